"""Loads a prompt's KV from the store into reserved blocks, where that is faster than computing it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common import logs, trace
from common.block_hash import BlockHash
from common.bucket_counts import BucketCounts
from common.errors import ShoalError
from common.metrics import TRANSFER_BUCKETS
from common.service_record import Fingerprint
from engine.engine_port import EnginePort, Fetch
from engine.kv_transfer.block_origins import BlockOrigins
from engine.kv_transfer.store_port import StorePort

log = logs.get(__name__)

_SMOOTHING = 0.3  # weight of the newest measurement
_FIRST_GUESS_BYTES_PER_S = 5e8  # of a load, until one was measured
_MIN_SAMPLE_BLOCKS = 4  # fewer say more about the call than about the rate


@dataclass(slots=True)
class LoadCounts:
    """Loads of a worker. `num_declined`: present in the store, but slower to load than to compute."""

    num_loads: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_declined: int = 0
    bytes_per_s: float = 0.0  # smoothed; 0 until measured
    copies: BucketCounts = field(default_factory=lambda: BucketCounts(TRANSFER_BUCKETS))  # seconds of each load


class StoreLoader:
    """One per worker. `blocks_present` asks without a lease; `load` copies into blocks that the caller has reserved."""

    def __init__(self, engine: EnginePort, store: StorePort, fingerprint: Fingerprint) -> None:
        self._engine, self._store, self._fingerprint = engine, store, fingerprint
        self.counts, self.origins = LoadCounts(), BlockOrigins()
        self._is_offered = False

    def offer(self) -> None:
        """From now on the engine may count on `serve` for what it preempts."""
        self._is_offered = True
        self._engine.tell_load_rate(self.counts.bytes_per_s or _FIRST_GUESS_BYTES_PER_S)

    async def serve(self, fetch: Fetch) -> None:
        """Bring back what the store has of a preempted sequence's blocks. Ends the fetch in every case."""
        try:
            present = await self.blocks_present(fetch.hashes)
            if present > fetch.num_present:
                await self.load(fetch.sequence_id, fetch.hashes[:present], fetch.block_ids, fetch.num_present)
        except ShoalError as error:
            log.warning("fetch_failed", why=str(error))
        finally:
            await asyncio.shield(self._end(fetch))

    async def _end(self, fetch: Fetch) -> None:
        try:
            await self._engine.end_fetch(fetch.sequence_id)
        except ShoalError:
            log.debug("nothing_to_end", sequence_id=fetch.sequence_id)  # the engine has ended, with all its requests

    async def blocks_present(self, hashes: Sequence[BlockHash]) -> int:
        if not hashes:
            return 0
        self.origins.note(hashes)
        with trace.span("kv.lookup", trace.CLIENT) as span:
            found = await self._store.lookup(hashes, self._fingerprint)
            span.put({"shoal.kv.asked_blocks": len(hashes), "shoal.kv.found_blocks": found})
        return found

    def is_worth(self, num_blocks: int) -> bool:
        """Whether loading is expected to take less time than computing; yes while either rate is unknown."""
        compute_rate = self._engine.stats.prefill_tokens_per_s
        if num_blocks <= 0:
            return False
        if not compute_rate or not self.counts.bytes_per_s:
            return True
        load_s = num_blocks * self._engine.facts.block_bytes / self.counts.bytes_per_s
        compute_s = num_blocks * self._fingerprint.block_size / compute_rate
        if load_s >= compute_s:
            self.counts.num_declined += 1
        return load_s < compute_s

    async def load(
        self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int], num_present: int
    ) -> int:
        """Fill `block_ids` from block `num_present` on with the chain's content and tell the engine; new progress.

        `num_present` and the result are in blocks. A cancellation leaves no copy running behind it.
        """
        chain = hashes[num_present:]
        reserved = block_ids[num_present : num_present + len(chain)]
        targets = [np.frombuffer(self._engine.block_view(block_id), np.uint8) for block_id in reserved]

        def sink(index: int, source: memoryview) -> None:
            np.copyto(targets[index], np.frombuffer(source, np.uint8))

        with trace.span("kv.transfer", trace.CLIENT, {"shoal.kv.from": "store"}) as span:
            started = time.perf_counter()
            loaded = await self._store.get(chain, self._fingerprint, sink)
            self._measure(loaded, time.perf_counter() - started)
            span.put({"shoal.kv.blocks": loaded, "shoal.kv.bytes": loaded * self._engine.facts.block_bytes})
            if loaded:
                num_tokens = (num_present + loaded) * self._fingerprint.block_size
                await self._engine.land(request_id, num_tokens)
        return num_present + loaded

    def _measure(self, num_blocks: int, seconds: float) -> None:
        counts, num_bytes = self.counts, num_blocks * self._engine.facts.block_bytes
        counts.num_loads += 1
        counts.copies.observe(seconds)
        counts.num_blocks += num_blocks
        counts.num_bytes += num_bytes
        if num_blocks >= _MIN_SAMPLE_BLOCKS and seconds > 0:
            rate = num_bytes / seconds
            counts.bytes_per_s = rate if not counts.bytes_per_s else (
                _SMOOTHING * rate + (1 - _SMOOTHING) * counts.bytes_per_s)
            if self._is_offered:
                self._engine.tell_load_rate(counts.bytes_per_s)
