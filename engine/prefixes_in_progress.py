"""The blocks that running prompts are about to complete: who else begins with them had better wait a moment.

Sixteen prompts with one long prefix that come together would each compute it; with this, the first one does, and the
others find it. A prompt that stands still, because the budget went to others, is not waited for.
"""

from __future__ import annotations

from common.block_hash import BlockHash
from engine.request import Request


class PrefixesInProgress:
    """Who computes which block of a prompt. Entries of what is computed by now do no harm: such blocks are hits."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._computing: dict[BlockHash, list[Request]] = {}  # running ones
        self._added: dict[str, list[BlockHash]] = {}  # by sequence id

    def __len__(self) -> int:
        return len(self._computing)

    def add(self, request: Request) -> None:
        """It runs from its progress on."""
        first, end = (n // self._block_size for n in (request.num_computed_tokens, request.num_kv_tokens))
        added = self._added[request.sequence_id] = request.block_hashes[first:end]
        for block_hash in added:
            self._computing.setdefault(block_hash, []).append(request)

    def remove(self, request: Request) -> None:
        """It runs no more."""
        for block_hash in self._added.pop(request.sequence_id):
            owners = self._computing[block_hash]
            owners.remove(request)
            if not owners:
                del self._computing[block_hash]

    def is_coming(self, block_hash: BlockHash | None, step_id: int) -> bool:
        """Whether a prompt that computes the block moved in the step before `step_id`, or has just begun."""
        owners = self._computing.get(block_hash, ()) if block_hash else ()
        return any(owner.last_step_id >= step_id - 1 or not owner.num_chunk_rows for owner in owners)
