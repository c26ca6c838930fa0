"""Who loses its blocks when a running sequence finds none, and how it gets its KV back.

    running or ready ──chosen──▶ waiting, at the front of its class
        its full blocks ──save, where loading is expected to be faster than computing──▶ lower tier

The victim is of the lowest priority class, and the latest admitted of it; `prefill_only` requests are never victims:
they do not grow, and others read their blocks. Nothing is in flight when blocks are taken.

On readmission the costs are compared again, for what the prefix cache does not have: `load_s` of the lower tier
against the measured rate of prefill. While no prefill has been measured, loading is taken to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.block_manager import BlockManager, PrefixHit
from engine.outputs import EngineStats
from engine.request import Request
from engine.swap_port import SwapPort


class Preemption:
    """`prefill_rate`: tokens per second, 0 while unknown. `port`: None means that all is computed again."""

    def __init__(
        self, blocks: BlockManager, block_size: int, counts: EngineStats, prefill_rate: Callable[[], float]
    ) -> None:
        self._blocks = blocks
        self._block_size = block_size
        self._counts = counts
        self._prefill_rate = prefill_rate
        self.port: SwapPort | None = None

    def victim(self, latest_first: Iterable[Request]) -> Request:
        """Who is to be preempted; there is one that may be."""
        return max((r for r in latest_first if not r.prefill_only), key=lambda request: request.priority)

    def take_blocks(self, request: Request) -> None:
        """Save what is worth it, and give the blocks of a victim back."""
        self._blocks.commit(request)
        request.num_saved_blocks = 0
        if self.port is not None and not request.scores_prompt:
            hashes, block_ids = self._blocks.saved_part(request)
            if self._is_worth(len(hashes)):
                request.num_saved_blocks = self.port.save(request.sequence_id, hashes, block_ids)
                self._counts.num_swapped_out_blocks += request.num_saved_blocks
        self._blocks.free(request)
        request.lose_blocks()
        self._counts.num_preemptions += 1

    def is_loadable(self, request: Request, hit: PrefixHit) -> bool:
        """Whether what the hit lacks should come from the lower tier."""
        return self._is_worth(request.num_saved_blocks - len(hit.block_ids))

    def load(self, request: Request) -> None:
        """Begin to fill the blocks of a sequence that awaits KV. It may have landed and started on return."""
        assert self.port is not None
        num_saved = request.num_saved_blocks
        self.port.fetch(
            request.sequence_id, request.block_hashes[:num_saved], request.block_ids[:num_saved],
            request.num_computed_tokens // self._block_size)

    def count_loaded(self, request: Request, num_present_tokens: int) -> None:
        """A fetch has ended that began with so many tokens."""
        self._counts.num_swapped_in_blocks += (request.num_computed_tokens - num_present_tokens) // self._block_size

    def count_recomputed(self, request: Request) -> None:
        """It runs again from its progress on: what it had beyond that is computed a second time."""
        self._counts.num_recomputed_tokens += max(0, request.num_lost_tokens - request.num_computed_tokens)
        request.num_lost_tokens = 0

    def _is_worth(self, num_blocks: int) -> bool:
        if self.port is None or num_blocks <= 0:
            return False
        load_s, rate = self.port.load_s(num_blocks), self._prefill_rate()
        return load_s < (num_blocks * self._block_size / rate if rate else float("inf"))
