"""The global prefix index: block hash → the workers that hold the block.

Per worker: absent → holding (first block stored) → absent (removed, cleared or forgotten). The index only ever says
too little: beyond `max_blocks` hashes the longest known ones are forgotten, which costs a hit and nothing else.
A match walks a chain with a running AND of worker bitmasks, so a hole ends a worker's prefix; holes are normal. The
global index fed by workers' events follows Dynamo's and llm-d's KV-aware routers; the bitmask walk is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from common.block_hash import BlockHash
from router_svc.slots import WorkerSlots

EVICT_FRACTION = 16  # beyond the limit, one in this many is forgotten at once


class PrefixIndex:
    """All operations are O(hashes named), but the rare forgetting beyond `max_blocks`."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._slots = WorkerSlots()
        self._mask_of: dict[BlockHash, int] = {}  # never 0
        self._held: dict[str, set[BlockHash]] = {}  # by worker: the same facts the other way round
        self.num_forgotten = 0

    @property
    def num_blocks(self) -> int:
        """Different hashes."""
        return len(self._mask_of)

    def num_held(self, worker_id: str) -> int:
        return len(self._held.get(worker_id, ()))

    def held(self, worker_id: str) -> frozenset[BlockHash]:
        return frozenset(self._held.get(worker_id, ()))

    def store(self, worker_id: str, hashes: Iterable[BlockHash]) -> None:
        """Idempotent."""
        bit = 1 << self._slots.take(worker_id)
        held = self._held.setdefault(worker_id, set())
        mask_of = self._mask_of
        for block_hash in hashes:
            mask_of[block_hash] = mask_of.get(block_hash, 0) | bit
            held.add(block_hash)
        if len(mask_of) > self._max_blocks:
            self._forget_oldest()

    def remove(self, worker_id: str, hashes: Iterable[BlockHash]) -> None:
        """Hashes that the worker does not hold are passed over."""
        held = self._held.get(worker_id)
        if not held:
            return
        bit = 1 << self._slots.take(worker_id)
        for block_hash in hashes:
            if block_hash in held:
                held.remove(block_hash)
                self._drop_bit(block_hash, bit)

    def clear(self, worker_id: str) -> None:
        """The worker holds nothing; its slot is free again."""
        slot = self._slots.get(worker_id)
        if slot is None:
            return
        for block_hash in self._held.pop(worker_id, ()):
            self._drop_bit(block_hash, 1 << slot)
        self._slots.free(worker_id)

    def match(
        self, hashes: Sequence[BlockHash], expected: Callable[[BlockHash], Iterable[str]] | None = None
    ) -> dict[str, int]:
        """How many blocks from the chain's start each worker holds; workers with none are left out.

        `expected` names workers that will hold a block soon; it counts as held.
        """
        depths: dict[str, int] = {}
        alive = -1  # all workers
        for depth, block_hash in enumerate(hashes):
            mask = self._mask_of.get(block_hash, 0)
            for worker_id in expected(block_hash) if expected is not None else ():
                mask |= 1 << self._slots.take(worker_id)
            here = mask if depth == 0 else alive & mask
            if depth and (gone := alive & ~mask):
                depths.update(dict.fromkeys(self._slots.names(gone), depth))
            alive = here
            if not alive:
                return depths
        if hashes:
            depths.update(dict.fromkeys(self._slots.names(alive), len(hashes)))
        return depths

    def _drop_bit(self, block_hash: BlockHash, bit: int) -> None:
        left = self._mask_of[block_hash] & ~bit
        if left:
            self._mask_of[block_hash] = left
        else:
            del self._mask_of[block_hash]

    def _forget_oldest(self) -> None:
        num = len(self._mask_of) - self._max_blocks + self._max_blocks // EVICT_FRACTION
        for block_hash in list(islice(self._mask_of, num)):
            for worker_id in self._slots.names(self._mask_of.pop(block_hash)):
                self._held[worker_id].discard(block_hash)
        self.num_forgotten += num
