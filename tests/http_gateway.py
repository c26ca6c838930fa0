"""The gateway's real HTTP server in the test's own loop, in front of fakes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

from common.directory import Directory
from common.placement import RouterPort
from common.registry import MemoryRegistry
from common.server_url import open_redis
from common.service_record import ServiceRecord
from gateway.admission import Admission
from gateway.app import Ports, build_app
from gateway.config import GatewayConfig
from gateway.service import HttpServer
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.redis_limits import RedisLimits
from tests.fakes import MODEL, FakeDecode, FakeTokenizer

M0: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


@dataclass
class HttpGateway:
    port: int
    client: httpx2.AsyncClient
    decode: FakeDecode
    tokenizer: FakeTokenizer
    admission: Admission
    server: HttpServer
    keys: KeyRing

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def chat(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx2.Response:
        return await self.client.post("/v1/chat/completions", json={**M0, **changes}, headers=headers)

    async def complete(self, prompt: Any = "A B C", **changes: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **changes})

    async def alive(self) -> bool:
        return (await self.client.get("/ready")).status_code == 200 and (await self.chat()).status_code == 200

    async def raw(self, path: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """An open connection on which the request has been sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        payload = json.dumps(body).encode()
        writer.write(f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                     f"Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def http_gateway(
    decode: FakeDecode | None = None, tokenizer: FakeTokenizer | None = None, router: RouterPort | None = None,
    **settings: Any,
) -> AsyncIterator[HttpGateway]:
    config = GatewayConfig(**{"port": 0, "worker_wait_s": 0.2, **settings})
    registry = MemoryRegistry()
    await registry.register(ServiceRecord("tokenizer", "t0", "i0", "127.0.0.1:1", models=(MODEL,)), 60)
    directory = Directory(registry)
    await directory.refresh()
    decode, tokenizer = decode or FakeDecode(), tokenizer or FakeTokenizer()
    admission = Admission(config.max_concurrent_requests, config.overload_retry_after_s)
    keys = KeyRing(config.api_keys, config.api_key_file)
    limits_client = open_redis(config.redis_url)
    ports = Ports(tokenizer, decode, router, directory, RedisLimits(limits_client, config.rate_limit_timeout_s))
    server = HttpServer(build_app(config, keys, ports, admission, "1.2.3"), config)
    await server.start()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=20) as client:
        try:
            yield HttpGateway(server.port, client, decode, tokenizer, admission, server, keys)
        finally:
            await server.stop()
            await limits_client.aclose()


async def until(condition: Any, what: str) -> None:
    """Wait for a condition of the fakes; fails after 5 s."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 5 s: {what}")


def events(body: str) -> list[Any]:
    """The data of all events of an SSE body, parsed; `[DONE]` as it is."""
    out: list[Any] = []
    for line in body.split("\n\n"):
        if line.startswith("data: "):
            text = line.removeprefix("data: ")
            out.append(text if text == "[DONE]" else json.loads(text))
        else:
            assert line == "" or line.startswith(":"), f"not an event: {line!r}"
    return out


def text_of(chunks: list[Any]) -> str:
    """The joined text of a stream's chunks, of either endpoint."""
    choices = [c for chunk in chunks if isinstance(chunk, dict) for c in chunk.get("choices", ())]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)
