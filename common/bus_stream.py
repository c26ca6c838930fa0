"""Facts that a late or briefly cut-off listener may catch up on: bounded streams on JetStream.

States of a `StreamFollower`: (re)opening (the stream made if absent, a consumer from the next position) → following
→ silent (not even the server's heartbeat for `SILENT_S`) → reopening. A stream that was lost with its server is made
again and read from its start. Delivery is in order and at least once; what fell out of the stream's limits or out of
a listener's buffer is a gap, so messages carry their own sequence and the reader judges by that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import BadRequestError, NoStreamResponseError, NotFoundError

from common import logs
from common.errors import Unavailable

log = logs.get(__name__)

Handler = Callable[[str, bytes], Awaitable[None]]  # (subject, payload)

HEARTBEAT_S = 0.5
SILENT_S = 2.0
CALL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Stream:
    """What is kept: all messages under `prefix`, in memory, oldest discarded beyond either limit."""

    name: str
    prefix: str  # subjects are `<prefix>.<token>`
    max_age_s: float
    max_bytes: int


async def append(client: Client, stream: Stream, subject: str, payload: bytes) -> None:
    """Return when the server has stored it; raises `Unavailable` when that is not known."""
    if not client.is_connected:
        raise Unavailable("the bus is disconnected")
    try:
        try:
            await client.jetstream().publish(subject, payload, timeout=CALL_TIMEOUT_S)
        except NoStreamResponseError:
            await ensure(client, stream)
            await client.jetstream().publish(subject, payload, timeout=CALL_TIMEOUT_S)
    except (NatsError, TimeoutError, OSError) as error:
        raise Unavailable(f"stream {stream.name}: {type(error).__name__}") from error


async def ensure(client: Client, stream: Stream) -> Any:
    """Make the stream unless it exists; returns what the server says of it."""
    manager = client.jsm(timeout=CALL_TIMEOUT_S)
    try:
        return await manager.stream_info(stream.name)
    except NotFoundError:
        config = StreamConfig(
            name=stream.name, subjects=[f"{stream.prefix}.>"], retention=RetentionPolicy.LIMITS,
            storage=StorageType.MEMORY, discard=DiscardPolicy.OLD, max_age=stream.max_age_s,
            max_bytes=stream.max_bytes, num_replicas=1)
        try:
            return await manager.add_stream(config)
        except BadRequestError:  # another process made it in between
            return await manager.stream_info(stream.name)


class StreamFollower:
    """Calls `handler` for each message, one at a time, from the oldest kept one on. `run` never returns."""

    def __init__(self, client: Client, stream: Stream, handler: Handler) -> None:
        self._client, self._stream, self._handler = client, stream, handler
        self._position = 0  # stream sequence of the last message handled
        self._created: Any = None  # of the stream that `_position` counts in
        self._heard_at = 0.0

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except (NatsError, TimeoutError, OSError) as error:
                log.debug("stream_not_open", stream=self._stream.name, error=repr(error))
            except Exception:  # whatever it was, a listener does not stay deaf
                log.exception("stream_follower_failed", stream=self._stream.name)
            await asyncio.sleep(HEARTBEAT_S)

    async def _follow(self) -> None:
        """Open a consumer and stay until it is silent."""
        found = await ensure(self._client, self._stream)
        if found.created != self._created or found.state.last_seq < self._position:
            self._created, self._position = found.created, 0
        inbox = self._client.new_inbox()
        subscription = await self._client.subscribe(inbox, cb=self._on_message)
        consumer = None
        try:
            consumer = await self._client.jsm(timeout=CALL_TIMEOUT_S).add_consumer(
                self._stream.name, ConsumerConfig(
                    deliver_subject=inbox, deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=self._position + 1, ack_policy=AckPolicy.NONE, idle_heartbeat=HEARTBEAT_S,
                    mem_storage=True, num_replicas=1))
            self._heard_at = time.monotonic()
            while time.monotonic() - self._heard_at < SILENT_S:
                await asyncio.sleep(HEARTBEAT_S)
            log.info("stream_silent", stream=self._stream.name)
        finally:
            await self._close(subscription, consumer)

    async def _close(self, subscription: Any, consumer: Any) -> None:
        try:
            await subscription.unsubscribe()
            if consumer is not None and self._client.is_connected:
                await self._client.jsm(timeout=CALL_TIMEOUT_S).delete_consumer(self._stream.name, consumer.name)
        except (NatsError, TimeoutError, OSError):
            log.debug("consumer_left_to_expire", stream=self._stream.name)

    async def _on_message(self, message: Any) -> None:
        self._heard_at = time.monotonic()
        if (message.headers or {}).get("Status"):
            return  # the server's heartbeat
        position = message.metadata.sequence.stream
        if position <= self._position:
            return
        try:
            await self._handler(message.subject, message.data)
        except Exception:
            log.exception("stream_handler_failed", stream=self._stream.name)
        self._position = position
        self._heard_at = time.monotonic()
