"""Facts that may be heard by many. Nothing that must not be lost goes here; nothing waits for an answer.

Two kinds: `publish` is heard by whoever listens now; `append` is kept a while in a bounded stream
(common/bus_stream.py), so that a listener that starts or comes back later can catch up.

States of `NatsBus`: connecting → connected ⇄ disconnected (reconnects for ever) → closed. While disconnected,
`publish` drops and counts: a fact that is late is worth less than the next one. Subscriptions come back by
themselves after a reconnect.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, Protocol

from nats.aio.client import Client
from nats.errors import Error as NatsError

from common import bus_stream, logs, trace
from common.bus_stream import Handler, Stream
from common.errors import Unavailable
from common.metrics import counter, gauge
from common.server_url import NatsServer, masked, offers_tls

log = logs.get(__name__)

DROPPED = counter("shoal_bus_dropped_total", "facts not published because the bus was disconnected")
CONNECTED = gauge("shoal_bus_connected", "1 while the bus is connected")


class Bus(Protocol):
    """Publish and subscribe by subject; `*` matches one token, `>` the rest, as in NATS."""

    @property
    def connected(self) -> bool: ...

    async def publish(self, subject: str, payload: bytes) -> None: ...

    async def subscribe(self, subject: str, handler: Handler) -> None: ...

    async def append(self, stream: Stream, subject: str, payload: bytes) -> None:
        """Return when the message is kept; raises `Unavailable` when that is not known. Makes an absent stream."""

    async def follow(self, stream: Stream, handler: Handler) -> None:
        """From now on `handler` gets every kept message, oldest first, then new ones; one at a time, in order."""

    async def close(self) -> None: ...


class NatsBus:
    """`Bus` on NATS core."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._following: set[asyncio.Task[None]] = set()

    @staticmethod
    async def connect(url: str, name: str, timeout_s: float, ca: str = "") -> NatsBus:
        """`ca` is a PEM file for `tls://`. Raises `Unavailable` when no server lets us in within `timeout_s`."""
        client, server = Client(), NatsServer.parse(url)
        last_error: list[Exception] = []

        async def on_error(error: Exception) -> None:
            if not (last_error and isinstance(last_error[0], NatsError)):  # what the server said tells the most
                last_error[:] = [error]
            log.debug("bus_error", error=masked(repr(error)))

        async def on_disconnect() -> None:
            CONNECTED.set(0)
            (log.info if client.is_closed else log.warning)("bus_disconnected")

        async def on_reconnect() -> None:
            CONNECTED.set(1)
            log.info("bus_reconnected")

        options: dict[str, Any] = {
            **server.options(client, ca), "name": name, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.25,
            "ping_interval": 5, "max_outstanding_pings": 2, "error_cb": on_error,
            "disconnected_cb": on_disconnect, "reconnected_cb": on_reconnect,
        }
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(**options)
                if server.tls and not offers_tls(client):
                    raise NatsError("the server offers no TLS, and the URL asks for it")
        except (OSError, TimeoutError, NatsError) as error:
            await _close_quietly(client)
            spoken = last_error and (isinstance(error, TimeoutError) or isinstance(last_error[0], NatsError))
            cause = last_error[0] if spoken else error
            raise Unavailable(f"NATS at {server.address.rpartition('/')[2]} is not reachable within {timeout_s:g} s "
                              f"({type(cause).__name__}: {masked(str(cause))})") from None
        CONNECTED.set(1)
        return NatsBus(client)

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    async def publish(self, subject: str, payload: bytes) -> None:
        if not self.connected:
            DROPPED.inc()
            return
        try:
            await self._client.publish(subject, payload, headers=trace.carrier() or None)
        except NatsError:
            DROPPED.inc()

    async def subscribe(self, subject: str, handler: Handler) -> None:
        async def on_message(message: Any) -> None:
            with trace.attached(message.headers or {}):
                await handler(message.subject, message.data)

        await self._client.subscribe(subject, cb=on_message)

    async def append(self, stream: Stream, subject: str, payload: bytes) -> None:
        await bus_stream.append(self._client, stream, subject, payload)

    async def follow(self, stream: Stream, handler: Handler) -> None:
        self._following.add(asyncio.create_task(bus_stream.StreamFollower(self._client, stream, handler).run()))

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await _close_quietly(self._client)


class MemoryBus:
    """`Bus` within one process, for tests: handlers run before `publish` returns."""

    def __init__(self) -> None:
        self._handlers: defaultdict[str, list[Handler]] = defaultdict(list)
        self._kept: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
        self._followers: defaultdict[str, list[Handler]] = defaultdict(list)
        self.connected = True

    async def publish(self, subject: str, payload: bytes) -> None:
        if self.connected:
            for pattern, handlers in self._handlers.items():
                if _matches(pattern.split("."), subject.split(".")):
                    for handler in handlers:
                        await handler(subject, payload)

    async def subscribe(self, subject: str, handler: Handler) -> None:
        self._handlers[subject].append(handler)

    async def append(self, stream: Stream, subject: str, payload: bytes) -> None:
        if not self.connected:
            raise Unavailable("the bus is disconnected")
        self._kept[stream.name].append((subject, payload))
        for handler in self._followers[stream.name]:
            await handler(subject, payload)

    async def follow(self, stream: Stream, handler: Handler) -> None:
        for subject, payload in list(self._kept[stream.name]):
            await handler(subject, payload)
        self._followers[stream.name].append(handler)

    async def close(self) -> None:
        self._handlers.clear()
        self._followers.clear()


def _matches(pattern: list[str], subject: list[str]) -> bool:
    if pattern and pattern[-1] == ">":
        return len(subject) >= len(pattern) and _matches(pattern[:-1], subject[: len(pattern) - 1])
    return len(pattern) == len(subject) and all(p in ("*", s) for p, s in zip(pattern, subject, strict=True))


async def _close_quietly(client: Client) -> None:
    try:
        async with asyncio.timeout(2.0):
            await client.close()
    except (TimeoutError, NatsError, OSError):
        log.debug("bus_close_failed")


