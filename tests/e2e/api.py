"""A stack's API as a client sees it, with what must be true of the stack after an odd request."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tests.e2e.streams import ledger_is_clean
from tests.http_gateway import events, text_of
from tests.stack import RunningStack

BESIDE = "The quick brown fox jumps over the lazy dog, and the river drifts along the seven green hills. " * 2


@dataclass
class Api:
    """`worker` is the stack's only one. `echoes`: its runner says the prompt again."""

    stack: RunningStack
    client: httpx2.AsyncClient
    echoes: bool = False
    worker: str = "mixed-0"

    async def chat(self, headers: Any = None, **changes: Any) -> httpx2.Response:
        body = {"model": self.stack.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4,
                "temperature": 0}
        return await self.client.post("/v1/chat/completions", json={**body, **changes}, headers=headers)

    async def complete(self, prompt: Any, headers: Any = None, **changes: Any) -> httpx2.Response:
        body = {"model": self.stack.model, "prompt": prompt, "temperature": 0}
        return await self.client.post("/v1/completions", json={**body, **changes}, headers=headers)

    async def tokens(self, **source: Any) -> list[int]:
        """Token ids of a `prompt` or of `messages`."""
        answer = await self.client.post("/tokenize", json={"model": self.stack.model, **source})
        ids: list[int] = answer.json()["tokens"]
        return ids

    async def raw(self, body: dict[str, Any], headers: str = "") -> asyncio.StreamWriter:
        """A connection on which a completion was asked for; `headers` are whole lines."""
        url = urlsplit(self.stack.url)
        _reader, writer = await asyncio.open_connection(url.hostname, url.port)
        payload = json.dumps({"model": self.stack.model, **body}).encode()
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{headers}"
                     f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        return writer

    async def metric(self, name: str, process: str = "") -> float:
        return (await asyncio.to_thread(self.stack.metrics, process or self.worker))[name]

    async def until(
        self, name: str, met: Callable[[float], bool], within_s: float = 5.0, process: str = ""
    ) -> None:
        deadline = time.monotonic() + within_s
        while not met(value := await self.metric(name, process)):
            assert time.monotonic() < deadline, f"{name} is {value} after {within_s:g} s"
            await asyncio.sleep(0.02)

    async def is_alive(self) -> bool:
        """Ready, and a short chat is answered within five seconds."""
        ready = await self.client.get("/ready")
        answer = await asyncio.wait_for(self.chat(), 5)
        return (ready.status_code, answer.status_code) == (200, 200)

    async def comes_to_rest(self) -> None:
        """Within two seconds nothing runs or waits and all blocks are back; no more tokens are drawn then."""
        assert await ledger_is_clean(self.stack, [self.worker]), self.stack.metrics(self.worker)
        await self.until("shoal_gateway_requests_in_flight", lambda value: value == 0, 2, "gateway-0")
        drawn = await self.metric("shoal_generated_tokens_total")
        await asyncio.sleep(0.2)
        assert drawn == await self.metric("shoal_generated_tokens_total")

    @asynccontextmanager
    async def unharmed(self) -> AsyncIterator[None]:
        """Do something odd inside: a stream that runs beside it is whole, and afterwards the stack is alive."""
        started = await self.metric("shoal_generated_tokens_total")
        beside = asyncio.create_task(self.complete(BESIDE, max_tokens=60, ignore_eos=not self.echoes, stream=True))
        try:
            await self.until("shoal_generated_tokens_total", lambda drawn: drawn > started)
            yield
            chunks = events((await beside).text)
        finally:
            beside.cancel()
        assert chunks[-1] == "[DONE]"
        assert text_of(chunks) == BESIDE if self.echoes else chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert await self.is_alive()


@asynccontextmanager
async def api_of(stack: RunningStack, *, echoes: bool = False) -> AsyncIterator[Api]:
    async with httpx2.AsyncClient(base_url=stack.url, timeout=30) as client:
        yield Api(stack, client, echoes)


def refusal(answer: httpx2.Response, statuses: Sequence[int], *codes: str, param: str | None = "any") -> str:
    """The message of an error in OpenAI's envelope, whose status, code (when given) and param are as expected."""
    assert answer.status_code in statuses, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not codes or body["error"]["code"] in codes, body
    assert param in ("any", body["error"]["param"]), body
    message: str = body["error"]["message"]
    assert not any(word in message for word in ("Traceback", "jinja", "Template"))
    return message
