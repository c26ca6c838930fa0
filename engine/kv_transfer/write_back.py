"""Copies what an engine has cached into the store, behind the engine's back and never in its way.

States of a run of blocks: announced (the engine published their hashes) → queued → pinned → written → unpinned, or
dropped: evicted before its turn, or pushed out of a full queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common import logs, trace
from common.block_hash import BlockHash
from common.bucket_counts import BucketCounts
from common.errors import ShoalError
from common.kv_event import BlockStored, KvEvent
from common.metrics import TRANSFER_BUCKETS
from common.service_record import Fingerprint
from common.span import NO_SPAN, Span, SpanLink
from engine.engine_port import EnginePort
from engine.kv_transfer.block_origins import BlockOrigins
from engine.kv_transfer.store_port import StorePort

log = logs.get(__name__)

MAX_QUEUED_RUNS = 4096
_MAX_RUN_BLOCKS = 64  # of one put


@dataclass(slots=True)
class WriteBackCounts:
    num_blocks: int = 0
    num_bytes: int = 0
    num_dropped_blocks: int = 0
    copies: BucketCounts = field(default_factory=lambda: BucketCounts(TRANSFER_BUCKETS))  # seconds of each put


class WriteBack:
    """Write-through on publication. `stop` writes what is queued, within its limit."""

    def __init__(
        self, engine: EnginePort, store: StorePort, fingerprint: Fingerprint, origins: BlockOrigins | None = None
    ) -> None:
        self._engine, self._store, self._fingerprint = engine, store, fingerprint
        self._origins = origins or BlockOrigins()
        self._runs: deque[BlockStored] = deque()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self.counts = WriteBackCounts()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._queue(event)

    async def stop(self, flush_s: float) -> None:
        try:
            async with asyncio.timeout(flush_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("write_back_cut_short", queued=len(self._runs))
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _queue(self, run: BlockStored) -> None:
        if len(self._runs) >= MAX_QUEUED_RUNS:
            self.counts.num_dropped_blocks += len(self._runs.popleft().hashes)
        self._runs.append(run)
        self._idle.clear()
        self._ready.set()

    async def _run(self) -> None:
        while True:
            await self._ready.wait()
            while self._runs:
                hashes, parent = self._next_run()
                try:
                    await self._write(hashes, parent)
                except Exception as error:  # these blocks are lost to the store; the next ones are not
                    self.counts.num_dropped_blocks += len(hashes)
                    log.warning("write_back_failed", error=repr(error), exc_info=not isinstance(error, ShoalError))
            self._ready.clear()
            self._idle.set()

    def _next_run(self) -> tuple[tuple[BlockHash, ...], BlockHash]:
        """The oldest run, joined with those that continue its chain."""
        first = self._runs.popleft()
        hashes = first.hashes
        while self._runs and self._runs[0].parent == hashes[-1] and len(hashes) < _MAX_RUN_BLOCKS:
            hashes += self._runs.popleft().hashes
        if len(hashes) > _MAX_RUN_BLOCKS:
            self._runs.appendleft(BlockStored(hashes[_MAX_RUN_BLOCKS:], hashes[_MAX_RUN_BLOCKS - 1]))
        return hashes[:_MAX_RUN_BLOCKS], first.parent

    async def _write(self, hashes: tuple[BlockHash, ...], parent: BlockHash) -> None:
        pinned = await self._engine.pin(hashes)
        held = []
        try:
            for block_hash in hashes:  # a chain is stored without holes: up to the first that was evicted
                if block_hash not in pinned:
                    break
                held.append(block_hash)
            views = [self._engine.block_view(pinned[block_hash]) for block_hash in held]
            if held:
                started = time.perf_counter()
                with self._span(held, parent) as span:
                    written = await self._store.put(held, parent, self._fingerprint, views)
                    span.put({"shoal.kv.blocks": written, "shoal.kv.bytes": written * self._engine.facts.block_bytes})
                self.counts.copies.observe(time.perf_counter() - started)
                self.counts.num_blocks += written
                self.counts.num_bytes += written * self._engine.facts.block_bytes
            self.counts.num_dropped_blocks += len(hashes) - len(held)
        finally:
            block_ids = list(pinned.values())
            await asyncio.shield(self._engine.unpin(block_ids))

    def _span(self, hashes: Sequence[BlockHash], parent: BlockHash) -> Span:
        """A trace of its own, for no request waits for it; it links to the one that the blocks are due to."""
        origin = self._origins.of(hashes, parent)
        return trace.root("kv.put", trace.CLIENT, links=(SpanLink(origin, {}),)) if origin is not None else NO_SPAN
