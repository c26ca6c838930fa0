"""A worker's KV events on their way to the routers: sequenced batches on a stream, and snapshots that agree with them.

States of a `KvEventPublisher`: sending (each batch is kept by the server before the next is sent) ⇄ behind (a send
failed, or too much waits: what waits is dropped, the sequence has moved on, so every listener sees the gap and takes
a snapshot) → stopped. Every `HEARTBEAT_S` without a batch an empty one repeats the last seq, so that a listener
notices even the loss of the last batch. Nothing here makes the engine wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from common import logs
from common.block_hash import HASH_BYTES, BlockHash
from common.bus import Bus
from common.bus_stream import Stream
from common.errors import Unavailable
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from common.metrics import counter
from proto import events_pb2, kvstore_pb2, worker_pb2

log = logs.get(__name__)

KV_STREAM = Stream("SHOAL_KV", "shoal.kv", max_age_s=600.0, max_bytes=64 << 20)
HEARTBEAT_S = 2.0
RETRY_S = 0.25
MAX_WAITING_BATCHES = 1024
MAX_BATCH_HASHES = 16_384  # of a batch or of a snapshot's chunk: 256 KiB

DROPPED = counter("shoal_kv_event_batches_dropped_total", "batches that no router will get; a snapshot replaces them")


@dataclass(frozen=True, slots=True)
class KvBatch:
    """`events` in order; seq starts at 1 in each incarnation. Empty: a heartbeat that repeats the last seq."""

    worker_id: str
    incarnation: str
    model: str
    seq: int
    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All hashes that a worker holds after its batch `seq`."""

    worker_id: str
    incarnation: str
    seq: int
    stored: tuple[BlockStored, ...]


BatchHandler = Callable[[KvBatch], Awaitable[None]]


class KvEventPublisher:
    """Event loop only. `publish` what `EngineCore.take_events` returned, after the step that wrote it has retired."""

    def __init__(
        self, bus: Bus, worker_id: str, incarnation: str, model: str, *, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._bus, self._heartbeat_s = bus, heartbeat_s
        self._worker_id, self._incarnation, self._model = worker_id, incarnation, model
        self._seq = 0
        self._parent_of: dict[BlockHash, BlockHash] = {}  # of every hash that is public now
        self._waiting: deque[events_pb2.KvEventBatch] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def seq(self) -> int:
        """Of the last batch published."""
        return self._seq

    def start(self) -> None:
        self._task = asyncio.create_task(self._send())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Take the events into the snapshot and queue them. Never blocks, never fails."""
        for part in _parts(events):
            for event in part:
                self._apply(event)
            self._seq += 1
            self._waiting.append(self._batch(part))
        if len(self._waiting) > MAX_WAITING_BATCHES:
            self._drop_waiting()
        self._wake.set()

    def snapshot(self) -> KvSnapshot:
        """What all batches up to `seq` amount to."""
        return KvSnapshot(self._worker_id, self._incarnation, self._seq, tuple(_runs(self._parent_of)))

    def _apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored(hashes, parent):
                for block_hash in hashes:
                    self._parent_of[block_hash] = parent
                    parent = block_hash
            case BlockRemoved(hashes):
                for block_hash in hashes:
                    self._parent_of.pop(block_hash, None)
            case BlocksCleared():
                self._parent_of.clear()

    def _batch(self, events: Sequence[KvEvent]) -> events_pb2.KvEventBatch:
        return events_pb2.KvEventBatch(
            worker_id=self._worker_id, incarnation=self._incarnation, seq=self._seq, model=self._model,
            events=[_event_to_proto(e) for e in events])

    async def _send(self) -> None:
        while True:
            if not self._waiting:
                self._wake.clear()
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._wake.wait()
                except TimeoutError:
                    self._waiting.append(self._batch(()))
            batch = self._waiting.popleft()
            try:
                await self._bus.append(
                    KV_STREAM, f"{KV_STREAM.prefix}.{self._worker_id}", batch.SerializeToString())
            except Unavailable:
                self._drop_waiting(1 if batch.events else 0)
                await asyncio.sleep(RETRY_S)
                self._waiting.append(self._batch(()))  # tells the listeners, as soon as it gets through

    def _drop_waiting(self, num_more: int = 0) -> None:
        DROPPED.inc(sum(bool(batch.events) for batch in self._waiting) + num_more)
        self._waiting.clear()


async def follow_kv_events(bus: Bus, on_batch: BatchHandler) -> None:
    """`on_batch` gets all batches of all workers: of each worker in order, with repeats and gaps possible."""

    async def handler(_subject: str, payload: bytes) -> None:
        await on_batch(_batch_from(events_pb2.KvEventBatch.FromString(payload)))

    await bus.follow(KV_STREAM, handler)


def snapshot_chunks(snapshot: KvSnapshot) -> Iterator[worker_pb2.SnapshotChunk]:
    """The messages of `Worker.Snapshot`; at least one, the last marked so."""
    parts = list(_parts(snapshot.stored)) or [[]]
    for index, part in enumerate(parts):
        yield worker_pb2.SnapshotChunk(
            worker_id=snapshot.worker_id, incarnation=snapshot.incarnation, seq=snapshot.seq,
            events=[_event_to_proto(e) for e in part], last=index == len(parts) - 1)


async def read_snapshot(chunks: AsyncIterable[worker_pb2.SnapshotChunk]) -> KvSnapshot:
    """The snapshot that `chunks` carry; raises `Unavailable` when the stream ends before its last one."""
    stored: list[BlockStored] = []
    async for chunk in chunks:
        stored.extend(e for raw in chunk.events if isinstance(e := _event_from(raw), BlockStored))
        if chunk.last:
            return KvSnapshot(chunk.worker_id, chunk.incarnation, chunk.seq, tuple(stored))
    raise Unavailable("the snapshot ended before its last chunk")


def _parts(events: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    """The same events in lists that fit one message each."""
    part: list[KvEvent] = []
    room = MAX_BATCH_HASHES
    for event in (piece for whole in events for piece in _pieces(whole)):
        size = 1 if isinstance(event, BlocksCleared) else len(event.hashes)
        if part and size > room:
            yield part
            part, room = [], MAX_BATCH_HASHES
        part.append(event)
        room -= size
    if part:
        yield part


def _pieces(event: KvEvent) -> Iterator[KvEvent]:
    if isinstance(event, BlocksCleared) or len(event.hashes) <= MAX_BATCH_HASHES:
        yield event
        return
    for start in range(0, len(event.hashes), MAX_BATCH_HASHES):
        hashes = event.hashes[start : start + MAX_BATCH_HASHES]
        if isinstance(event, BlockRemoved):
            yield BlockRemoved(hashes)
        else:
            yield BlockStored(hashes, event.hashes[start - 1] if start else event.parent)


def _runs(parent_of: dict[BlockHash, BlockHash]) -> Iterator[BlockStored]:
    """Chains as they were stored: a run goes on while each hash follows the one before it."""
    run: list[BlockHash] = []
    first_parent = b""
    for block_hash, parent in parent_of.items():
        if run and parent != run[-1]:
            yield BlockStored(tuple(run), first_parent)
            run = []
        if not run:
            first_parent = parent
        run.append(block_hash)
    if run:
        yield BlockStored(tuple(run), first_parent)


def _event_to_proto(event: KvEvent) -> events_pb2.KvEvent:
    device = kvstore_pb2.TIER_DEVICE
    match event:
        case BlockStored(hashes, parent):
            return events_pb2.KvEvent(stored=events_pb2.BlocksStored(
                block_hashes=b"".join(hashes), parent=parent, tier=device))
        case BlockRemoved(hashes):
            return events_pb2.KvEvent(removed=events_pb2.BlocksRemoved(block_hashes=b"".join(hashes), tier=device))
        case BlocksCleared():
            return events_pb2.KvEvent(cleared=events_pb2.BlocksCleared(tier=device))


def _batch_from(batch: events_pb2.KvEventBatch) -> KvBatch:
    return KvBatch(batch.worker_id, batch.incarnation, batch.model, batch.seq,
                   tuple(event for raw in batch.events if (event := _event_from(raw)) is not None))


def _event_from(event: events_pb2.KvEvent) -> KvEvent | None:
    """None for a kind that a newer version invented."""
    match event.WhichOneof("event"):
        case "stored":
            return BlockStored(_hashes_from(event.stored.block_hashes), event.stored.parent)
        case "removed":
            return BlockRemoved(_hashes_from(event.removed.block_hashes))
        case "cleared":
            return BlocksCleared()
    return None


def _hashes_from(packed: bytes) -> tuple[BlockHash, ...]:
    return tuple(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES))
