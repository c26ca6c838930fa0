"""A lower tier in this process's memory: bounded, least recently used content goes first. For the in-process API.

A block: absent ──save──▶ kept ──fetch──▶ kept (in use again) ──room is needed──▶ absent

Content is found by hash, so two sequences with the same blocks share them here too.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from common.block_hash import BlockHash
from common.errors import ConfigError
from engine.core import EngineCore

_FIRST_GUESS_BYTES_PER_S = 1e9  # of a copy, until one was measured
_SMOOTHING = 0.3  # weight of the newest measurement


class ArenaSwap:
    """A `SwapPort` of one engine. Copies at once: a fetch has ended when it returns. `max_bytes` is at least a block's.

    Raises `ConfigError` for a smaller one.
    """

    def __init__(self, core: EngineCore, max_bytes: int) -> None:
        if max_bytes < core.block_bytes:
            raise ConfigError(f"max_bytes must be at least one block of {core.block_bytes} bytes, got {max_bytes}",
                              param="max_bytes")
        self._core = core
        self._max_blocks = max_bytes // core.block_bytes
        self._kept: OrderedDict[BlockHash, bytes] = OrderedDict()  # least recently used first
        self._bytes_per_s = _FIRST_GUESS_BYTES_PER_S

    @property
    def num_bytes(self) -> int:
        return len(self._kept) * self._core.block_bytes

    def save(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> int:
        """Keeps the leading blocks, as many as the arena holds."""
        hashes = hashes[: self._max_blocks]
        for block_hash, block_id in zip(reversed(hashes), reversed(block_ids[: len(hashes)]), strict=True):
            if block_hash not in self._kept:
                self._kept[block_hash] = bytes(self._core.block_view(block_id))
            self._kept.move_to_end(block_hash)  # the chain's start is used last, so its end is dropped first
        while len(self._kept) > self._max_blocks:
            self._kept.popitem(last=False)
        return len(hashes)

    def load_s(self, num_blocks: int) -> float:
        return num_blocks * self._core.block_bytes / self._bytes_per_s

    def fetch(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int], num_present: int) -> None:
        started = time.perf_counter()
        num_filled = num_present
        for block_hash, block_id in zip(hashes[num_present:], block_ids[num_present:], strict=True):
            content = self._kept.get(block_hash)
            if content is None:
                break
            self._kept.move_to_end(block_hash)
            self._core.block_view(block_id)[:] = content
            num_filled += 1
        self._measure(num_filled - num_present, time.perf_counter() - started)
        if num_filled > num_present:
            self._core.land(request_id, num_filled * self._core.config.block_size)
        self._core.start(request_id)

    def _measure(self, num_blocks: int, seconds: float) -> None:
        if num_blocks and seconds > 0:
            rate = num_blocks * self._core.block_bytes / seconds
            self._bytes_per_s += _SMOOTHING * (rate - self._bytes_per_s)
