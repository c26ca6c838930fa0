"""Streams that go on until they are told to stop: what clients see while services restart."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import httpx2

WORDS: Final = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "seven", "green", "lanterns", "drift", "river")
_ANSWER_DEADLINE_S: Final = 300.0
_RETRY_FOR_S: Final = 240.0
_RETRY_EVERY_S: Final = 0.25
_PROXY_REFUSES_WITHIN_S: Final = 2.0


class Refused(Exception):
    """Nothing was begun: the connection was refused, or the gateway says that it drains."""


@dataclass(slots=True)
class Seen:
    num_whole: int = 0
    num_refused: int = 0  # and sent again
    failures: list[str] = field(default_factory=list)


class SteadyLoad:
    """`num_clients` clients, each one stream after another; every prompt is new.

    With `retry_refused` a client does what clients of the OpenAI API do on a refused connection and on 503: it sends
    the same request again. Whatever happens after the first byte of an answer is a failure in any case.
    """

    def __init__(self, url: str, model: str, *, num_clients: int = 2, num_words: int = 160, num_tokens: int = 16,
                 retry_refused: bool = False) -> None:
        self._url, self._model, self._num_clients = url, model, num_clients
        self._num_words, self._num_tokens, self._retry_refused = num_words, num_tokens, retry_refused
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.seen = Seen()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        """Streams in flight end by themselves."""
        self._ending.set()
        self._thread.join(timeout=2 * _ANSWER_DEADLINE_S)

    def wait_whole(self, num_more: int, timeout_s: float) -> None:
        """Until so many more answers were whole."""
        goal, deadline = self.seen.num_whole + num_more, time.monotonic() + timeout_s
        while self.seen.num_whole < goal and not self.seen.failures:
            assert time.monotonic() < deadline, f"only {self.seen} within {timeout_s} s"
            time.sleep(0.05)

    async def _run(self) -> None:
        timeout = httpx2.Timeout(_ANSWER_DEADLINE_S, connect=5)
        # A connection is not used twice: one that the server is about to close would fail for no fault of its own.
        limits = httpx2.Limits(max_keepalive_connections=0)
        async with httpx2.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(self._num_clients)))

    async def _client(self, http: httpx2.AsyncClient, number: int) -> None:
        count = 0
        while not self._ending.is_set():
            count += 1
            text = f"Story {number}.{count}.{random.random()}: " + " ".join(random.choices(WORDS, k=self._num_words))
            try:
                await self._ask(http, {"model": self._model, "prompt": text, "max_tokens": self._num_tokens,
                                       "temperature": 0, "ignore_eos": True, "stream": True})
                self.seen.num_whole += 1
            except Exception as error:
                self.seen.failures.append(f"{number}.{count}: {type(error).__name__} {error}")
                await asyncio.sleep(_RETRY_EVERY_S)

    async def _ask(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        deadline = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                await self._stream(http, body)
                return
            except Refused:
                if not self._retry_refused or time.monotonic() > deadline:
                    raise
                self.seen.num_refused += 1
                await asyncio.sleep(_RETRY_EVERY_S)

    async def _stream(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        """One answer with all its tokens, its finish reason and `[DONE]`."""
        reason, num_texts, begun, sent = None, 0, False, time.monotonic()
        try:
            async with http.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                begun = True
                if answer.status_code == 503:
                    raise Refused((await answer.aread()).decode())
                assert answer.status_code == 200, (await answer.aread()).decode()
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        assert reason == "length", f"finish reason {reason}"
                        assert num_texts > 0, "no text"
                        return
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        assert "error" not in event, event
                        for choice in event["choices"]:
                            reason = choice["finish_reason"] or reason
                            num_texts += bool(choice["text"])
        except httpx2.ConnectError as error:
            raise Refused(str(error)) from None
        except (httpx2.ReadError, httpx2.RemoteProtocolError) as error:
            # The engine's proxy of the port takes a connection and ends it at once when nobody is behind it. A gateway
            # that has taken a request answers it, so one that is cut later than that is a failure.
            if begun or time.monotonic() - sent > _PROXY_REFUSES_WITHIN_S:
                raise
            raise Refused(str(error)) from None
        raise AssertionError("the stream ended without [DONE]")
