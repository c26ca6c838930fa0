"""Keeps the prefix index true to what each worker holds, from its events and, where those do not suffice, snapshots.

A worker's life here, by what the directory says of it:

    unlisted ──listed──▶ syncing ──snapshot──▶ following(seq) ──gap in seq──▶ syncing
        ▲                   ▲                       │
        │                   └──new incarnation──────┤ (what was known of the old life is dropped at once)
        └──────gone from the directory──────────────┘ (and from the index and the mirror)

While syncing, batches are buffered; the snapshot's seq says which of them it contains (dropped) and which come after
(applied). A batch of an incarnation that is not listed is ignored: either of an old life, or of a new one whose
snapshot is taken as soon as it is listed. A batch with seq ≤ the last one is a repeat. An empty batch repeats the last
seq, and shows a gap when it is ahead. What the mirror knew of a worker stands in for the first snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from common import logs
from common.block_hash import BlockHash
from common.clients.kv_events import KvBatch, KvSnapshot
from common.errors import ShoalError
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from common.metrics import counter, preset
from common.service_record import ServiceRecord
from router_svc.index import PrefixIndex
from router_svc.mirror import Mirror, MirroredWorker

log = logs.get(__name__)

Fetch = Callable[[ServiceRecord], Awaitable[KvSnapshot]]

MAX_BUFFERED_BATCHES = 4096  # of one worker while its snapshot is on the way; beyond it another one is taken
RETRY_S = 0.5
MAX_RETRY_S = 10.0

BATCHES = preset(
    counter("shoal_router_kv_batches_total", "batches by what became of them", ["fate"]),
    ("applied", "repeat", "gap", "buffered", "other life"))
SNAPSHOTS = preset(
    counter("shoal_router_snapshots_total", "snapshots taken, by result", ["result"]),
    ("taken", "failed", "other life"))


@dataclass(slots=True)
class _Worker:
    """`seq` None: syncing."""

    record: ServiceRecord
    seq: int | None = None
    buffered: list[KvBatch] = field(default_factory=list)
    syncing: asyncio.Task[None] | None = None
    heard: float = field(default_factory=time.monotonic)  # when it was listed, or the last word of it came


class CacheFollower:
    """Event loop only. `fetch` raises `ShoalError` when the worker cannot answer."""

    def __init__(self, index: PrefixIndex, mirror: Mirror, fetch: Fetch, retry_s: float = RETRY_S) -> None:
        self._index, self._mirror, self._fetch, self._retry_s = index, mirror, fetch, retry_s
        self._workers: dict[str, _Worker] = {}

    @property
    def num_syncing(self) -> int:
        return sum(worker.seq is None for worker in list(self._workers.values()))

    def ages_s(self) -> dict[str, float]:
        """Seconds since the last word of each listed worker. Safe to ask from another thread."""
        now = time.monotonic()
        return {worker_id: now - worker.heard for worker_id, worker in list(self._workers.items())}

    def seq(self, worker_id: str) -> int | None:
        """The last batch applied; None while syncing or unlisted."""
        worker = self._workers.get(worker_id)
        return worker.seq if worker else None

    def load(self, mirrored: Iterable[MirroredWorker], listed: Mapping[str, ServiceRecord]) -> None:
        """Start from what the mirror knew; of workers that are not listed with that incarnation it knows nothing."""
        for known in mirrored:
            record = listed.get(known.worker_id)
            if record is not None and record.incarnation == known.incarnation:
                self._workers[known.worker_id] = _Worker(record, seq=known.seq)
                self._index.store(known.worker_id, known.hashes)

    def listed(self, records: Mapping[str, ServiceRecord]) -> list[str]:
        """The workers that are listed now. Returns those whose earlier life, if any, has ended."""
        ended = []
        for worker_id, worker in list(self._workers.items()):
            record = records.get(worker_id)
            if record is None or record.incarnation != worker.record.incarnation:
                ended.append(worker_id)
                self._forget(worker_id)
            else:
                worker.record = record
        for worker_id, record in records.items():
            if worker_id not in self._workers:
                self._workers[worker_id] = worker = _Worker(record)
                self._start_sync(worker)
        return ended

    async def on_batch(self, batch: KvBatch) -> None:
        worker = self._workers.get(batch.worker_id)
        if worker is None or worker.record.incarnation != batch.incarnation:
            BATCHES.labels("other life").inc()
            return
        worker.heard = time.monotonic()
        if worker.seq is None:
            if batch.events:
                worker.buffered.append(batch)
            BATCHES.labels("buffered").inc()
            if len(worker.buffered) > MAX_BUFFERED_BATCHES:
                worker.buffered.clear()  # the gap that this makes asks for the next snapshot
        else:
            self._take(worker, batch)

    async def stop(self) -> None:
        tasks = [worker.syncing for worker in self._workers.values() if worker.syncing is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, worker: _Worker, batch: KvBatch) -> None:
        assert worker.seq is not None
        if batch.seq <= worker.seq:
            BATCHES.labels("repeat").inc()
        elif batch.seq > worker.seq + 1 or not batch.events:
            BATCHES.labels("gap").inc()
            log.info("kv_events_gap", worker_id=batch.worker_id, last=worker.seq, got=batch.seq)
            worker.seq = None
            worker.buffered = [batch] if batch.events else []
            self._start_sync(worker)
        else:
            BATCHES.labels("applied").inc()
            worker.seq = batch.seq
            for event in batch.events:
                self._apply(batch.worker_id, event)
            self._mirror.write(worker.record, batch.seq, batch.events)

    def _apply(self, worker_id: str, event: KvEvent) -> None:
        match event:
            case BlockStored(hashes):
                self._index.store(worker_id, hashes)
            case BlockRemoved(hashes):
                self._index.remove(worker_id, hashes)
            case BlocksCleared():
                self._index.clear(worker_id)

    def _start_sync(self, worker: _Worker) -> None:
        if worker.syncing is None or worker.syncing.done():
            worker.syncing = asyncio.create_task(self._sync(worker))

    async def _sync(self, worker: _Worker) -> None:
        """Take snapshots until one fits, then go on from it."""
        pause_s = self._retry_s
        while worker.seq is None:
            try:
                snapshot = await self._fetch(worker.record)
            except ShoalError as error:
                SNAPSHOTS.labels("failed").inc()
                log.debug("snapshot_failed", worker_id=worker.record.service_id, error=error.message)
            else:
                if snapshot.incarnation == worker.record.incarnation:
                    self._adopt(worker, snapshot)
                    continue
                SNAPSHOTS.labels("other life").inc()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _adopt(self, worker: _Worker, snapshot: KvSnapshot) -> None:
        SNAPSHOTS.labels("taken").inc()
        worker.heard = time.monotonic()
        worker_id = worker.record.service_id
        hashes: list[BlockHash] = [h for stored in snapshot.stored for h in stored.hashes]
        self._index.clear(worker_id)
        self._index.store(worker_id, hashes)
        self._mirror.replace(worker.record, snapshot.seq)
        worker.seq = snapshot.seq
        buffered, worker.buffered = worker.buffered, []
        for batch in buffered:
            if worker.seq is None:
                worker.buffered.append(batch)  # a gap among them
            else:
                self._take(worker, batch)

    def _forget(self, worker_id: str) -> None:
        worker = self._workers.pop(worker_id)
        if worker.syncing is not None:
            worker.syncing.cancel()
        self._index.clear(worker_id)
        self._mirror.forget(worker.record)
