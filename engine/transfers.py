"""The requests whose blocks others read or write, and how much of the pool they may take.

    reserve ──▶ AWAITING_KV ──start, release──▶ left          prefilled ──▶ HELD ──abort, release──▶ left

Both keep their blocks whatever the scheduler is short of, for a copy may be running. So the blocks that await KV are
capped: running answers keep the rest of the pool, and transfers that wait for each other's blocks cannot fill it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from engine.request import Request, RequestStatus


class Transfers:
    """Owns the AWAITING_KV and HELD requests. A block in several tables counts once."""

    def __init__(self, max_awaiting_blocks: int) -> None:
        self.max_awaiting_blocks = max_awaiting_blocks
        self._awaiting: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._tables_of: Counter[int] = Counter()  # block -> tables of awaiting requests that hold it

    def __len__(self) -> int:
        return len(self._awaiting) + len(self._held)

    @property
    def num_awaiting(self) -> int:
        return len(self._awaiting)

    @property
    def num_awaiting_blocks(self) -> int:
        return len(self._tables_of)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def has_room(self, num_blocks: int, hit_block_ids: Sequence[int]) -> bool:
        """Whether a table of `num_blocks`, of which the hit's exist already, stays within the cap."""
        num_counted = sum(block_id in self._tables_of for block_id in hit_block_ids)
        return len(self._tables_of) + num_blocks - num_counted <= self.max_awaiting_blocks

    def wait_for_kv(self, request: Request) -> None:
        request.status = RequestStatus.AWAITING_KV
        self._awaiting[request.request_id] = request
        self._tables_of.update(request.block_ids)

    def hold(self, request: Request) -> None:
        request.status = RequestStatus.HELD
        self._held[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Before its blocks are given back."""
        if self._held.pop(request.request_id, None) is None:
            del self._awaiting[request.request_id]
            self._tables_of.subtract(request.block_ids)
            for block_id in request.block_ids:
                if not self._tables_of[block_id]:
                    del self._tables_of[block_id]
