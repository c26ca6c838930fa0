"""Writes one stream of server-sent events straight to ASGI.

States: waiting (nothing sent; the status may still become an error) → open (headers sent) → ending (the last event is
queued; more are refused) → closed. The first ending wins, so a stream has exactly one.

A writer task sends what is ready as one body part: when the client is slow, events gather and leave together. At most
`buffer_bytes` (plus one event) wait; then `write` waits for the reader, and with it the whole pipeline behind it.
Silence of `ping_s` is broken by a comment line.
"""

from __future__ import annotations

import asyncio

from starlette.types import Send

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"


class EventStream:
    """`open` once, `write` many, `end` once (bounded), `close` always."""

    def __init__(self, send: Send, *, ping_s: float, buffer_bytes: int, flush_timeout_s: float) -> None:
        self._send, self._ping_s = send, ping_s
        self._buffer_bytes, self._flush_timeout_s = buffer_bytes, flush_timeout_s
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._work = asyncio.Event()  # parts to send, or the end
        self._room = asyncio.Event()
        self._room.set()
        self._ending = False
        self._quiet = True  # nothing was sent since the last tick
        self._writer: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        return self._writer is not None

    def open(self) -> None:
        self._writer = asyncio.create_task(self._write())
        self._ticker = asyncio.get_running_loop().call_later(self._ping_s, self._tick)

    async def write(self, event: bytes) -> None:
        """Queue one event; waits while the reader is too far behind."""
        if self._ending:
            return
        self._append(event)
        if self._num_bytes > self._buffer_bytes:
            self._room.clear()
            await self._room.wait()

    async def end(self, last: bytes) -> None:
        """Queue the last event and wait, bounded, until all is sent. Only the first call counts."""
        if not self._ending:
            self._append(last)
            self._ending = True
        if self._writer is not None:
            await asyncio.wait({self._writer}, timeout=self._flush_timeout_s)

    async def close(self) -> None:
        """Free all, whatever the state. Before a full end the server then breaks the connection."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait({self._writer})

    def _append(self, event: bytes) -> None:
        self._parts.append(event)
        self._num_bytes += len(event)
        self._work.set()

    async def _write(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while True:
            await self._work.wait()
            self._work.clear()
            body = b"".join(self._parts)
            self._parts.clear()
            self._num_bytes = 0
            last = self._ending
            await self._send({"type": "http.response.body", "body": body, "more_body": not last})
            self._quiet = False
            self._room.set()
            if last:
                return

    def _tick(self) -> None:
        if self._quiet and not self._parts and not self._ending:
            self._append(PING)
        self._quiet = True
        self._ticker = asyncio.get_running_loop().call_later(self._ping_s, self._tick)
