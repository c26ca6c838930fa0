"""HTTP/1.1 for many streams at a low cost per chunk: asyncio protocols, one request at a time each, kept for the next.

A connection's states: connecting → idle ⇄ busy (one answer is awaited) → closed. Bytes go from the socket through the C
parser to the reader in one call, with the time they came; no task wakes per chunk.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, cast
from urllib.parse import urlsplit

import httptools

from common.errors import ConfigError
from stack.api_client import tls_context

OnBody = Callable[[bytes, float], None]  # a piece of a 200's body and when it came, by `time.perf_counter`
_MAX_ERROR_BYTES: Final = 64 << 10
_STALE_S: Final = 0.005  # a connection that ends so soon after the request was written had been closed before


class Disconnected(Exception):
    """The connection ended before the answer did."""


@dataclass(slots=True)
class Answer:
    """`body` only of a status other than 200, cut at 64 KiB."""

    status: int = 0
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class Connection(asyncio.Protocol):
    """Created by `Endpoint`; `ask` while idle only."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._on_body: OnBody | None = None
        self._answer = Answer()
        self._now = 0.0
        self._asked_at = 0.0
        self._got_bytes = False  # of the answer under way
        self.was_stale = False  # the server had closed it before it could see the request
        self.is_reusable = True

    def ask(self, request: bytes, on_body: OnBody) -> asyncio.Future[Answer]:
        """Write the request; the future ends with its answer, or raises `Disconnected`."""
        assert self._transport is not None
        assert self._waiter is None, "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._answer, self._got_bytes = on_body, Answer(), False
        self._asked_at = time.perf_counter()
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._waiter is None:
            self.close()  # bytes that nobody asked for
            return
        self._got_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            self._end(Disconnected(f"not an HTTP/1.1 answer: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self.was_stale = not self._got_bytes and time.perf_counter() - self._asked_at < _STALE_S
        self._end(Disconnected(f"connection lost before the answer's end{f': {exc}' if exc else ''}"))

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._answer.status == 200 and self._on_body is not None:
            self._on_body(body, self._now)
        elif len(self._answer.body) < _MAX_ERROR_BYTES:
            self._answer.body += body

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_reusable = False
        self._end(None)

    def _end(self, error: Disconnected | None) -> None:
        waiter, self._waiter, self._on_body = self._waiter, None, None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(self._answer)
        else:
            waiter.set_exception(error)


class Endpoint:
    """A server by URL and its idle connections."""

    def __init__(self, url: str, api_key: str = "") -> None:
        """Raises `ConfigError` for what is not an http or https URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL {url!r}: must be like http://HOST:PORT", param="url")
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = (tls_context(url) or ssl.create_default_context()) if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        fixed = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json",
                 "Accept": "text/event-stream, application/json"}
        if api_key:
            fixed["Authorization"] = f"Bearer {api_key}"
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: list[Connection] = []

    def encoded(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST, made before its time comes."""
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def ask(self, request: bytes, on_body: OnBody, on_resent: Callable[[], None] = lambda: None) -> Answer:
        """One answer, whole. The caller bounds it in time; cancelling closes the connection, which cancels the work.

        Raises `Disconnected` or `OSError`. A kept connection that the server had closed meanwhile is replaced once,
        which `on_resent` hears of; one that ends later is a failure, also before the first byte of an answer.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_reusable:
                continue
            try:
                return await self._on(connection, request, on_body)
            except Disconnected:
                if not connection.was_stale:
                    raise
                on_resent()
                break
        return await self._on(await self._connect(), request, on_body)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self._host, self._port, ssl=self._ssl)
        return connection

    async def _on(self, connection: Connection, request: bytes, on_body: OnBody) -> Answer:
        try:
            answer = await connection.ask(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer
