"""A lower tier that keeps the KV of preempted sequences; one per engine, called from the engine's thread.

    preempted ──save──▶ in the lower tier (or not) ──fetch──▶ landing (AWAITING_KV) ──land, start──▶ runs on

What the tier lost meanwhile is computed again: a fetch that brings less than was saved is no fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from common.block_hash import BlockHash


class SwapPort(Protocol):
    """`request_id` names a sequence, as `EngineCore.land` and `start` take it."""

    def save(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int]) -> int:
        """The sequence loses these blocks, a chain from its start; how many leading ones are safe on return."""

    def load_s(self, num_blocks: int) -> float:
        """Seconds that bringing back so many blocks is expected to take; infinity where it cannot."""

    def fetch(self, request_id: str, hashes: Sequence[BlockHash], block_ids: Sequence[int], num_present: int) -> None:
        """Begin to bring blocks `num_present ..` of the chain into `block_ids`; the ones before are there.

        It ends, now or later and whatever happens, with `EngineCore.land` as far as it got, then `EngineCore.start`.
        """
