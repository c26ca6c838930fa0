"""The KV store as the lower tier of preempted sequences, from the engine's thread: others fetch, and say how fast.

A block: cached ──written back (engine/kv_transfer/write_back.py), long before any preemption──▶ in the store
             └──fetch──▶ asked for ──whoever serves it: land, start──▶ the sequence runs on
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.block_hash import BlockHash
from engine.engine_port import Fetch


class StoreSwap:
    """A `SwapPort`. Until a rate is told, nothing is saved or fetched."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._fetches: list[Fetch] = []
        self.bytes_per_s = 0.0  # of loads, as measured by who serves them

    def take_fetches(self) -> list[Fetch]:
        """Those asked for since the last call; each has to be ended."""
        fetches, self._fetches = self._fetches, []
        return fetches

    def save(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> int:
        """Cached blocks are written back as they fill; what the store has lost is computed again."""
        return len(hashes)

    def load_s(self, num_blocks: int) -> float:
        return num_blocks * self._block_bytes / self.bytes_per_s if self.bytes_per_s else math.inf

    def fetch(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int], num_present: int) -> None:
        self._fetches.append(Fetch(request_id, tuple(hashes), tuple(block_ids), num_present))
