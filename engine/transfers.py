"""The sequences whose blocks others read or write, and how much of the pool they may take.

    reserve, load ──▶ AWAITING_KV ──start, release──▶ left          prefilled ──▶ HELD ──abort, release──▶ left
                          └──ended while it is being loaded──▶ orphan ──start──▶ left

All keep their blocks whatever the scheduler is short of, for a copy may be running. So the blocks that await KV are
capped: running answers keep the rest of the pool, and transfers that wait for each other's blocks cannot fill it.

What a lower tier loads is the engine's own affair: such a sequence can end at any time, and its blocks then wait as an
orphan's for the end of the load. Where nothing else awaits KV, one load may exceed the cap: it waits for nobody, takes
the blocks that computing would take too, and the longest sequences are those that loading spares the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from engine.request import Request, RequestStatus


class Transfers:
    """Owns the AWAITING_KV and HELD sequences. A block in several tables counts once."""

    def __init__(self, max_awaiting_blocks: int) -> None:
        self.max_awaiting_blocks = max_awaiting_blocks
        self._awaiting: dict[str, Request] = {}
        self._loading: dict[str, int] = {}  # of them, those from a lower tier: tokens that were there before
        self._orphans: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._tables_of: Counter[int] = Counter()  # block -> tables of awaiting sequences and orphans that hold it

    def __len__(self) -> int:
        return len(self._awaiting) + len(self._orphans) + len(self._held)

    @property
    def num_awaiting(self) -> int:
        return len(self._awaiting)

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def num_awaiting_blocks(self) -> int:
        return len(self._tables_of)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def orphans(self) -> Collection[Request]:
        return self._orphans.values()

    def has_room(self, num_blocks: int, hit_block_ids: Sequence[int]) -> bool:
        """Whether a table of `num_blocks`, of which the hit's exist already, stays within the cap."""
        num_counted = sum(block_id in self._tables_of for block_id in hit_block_ids)
        return len(self._tables_of) + num_blocks - num_counted <= self.max_awaiting_blocks

    def may_load(self, num_blocks: int, hit_block_ids: Sequence[int]) -> bool:
        """As `has_room`, for a preempted sequence."""
        return not self._tables_of or self.has_room(num_blocks, hit_block_ids)

    def wait_for_kv(self, request: Request, *, is_load: bool = False) -> None:
        request.status = RequestStatus.AWAITING_KV
        self._awaiting[request.sequence_id] = request
        self._tables_of.update(request.block_ids)
        if is_load:
            self._loading[request.sequence_id] = request.num_computed_tokens

    def is_loading(self, request: Request) -> bool:
        return request.sequence_id in self._loading

    def end_load(self, request: Request) -> int | None:
        """Tokens that were there before the load; None for a sequence that others fill."""
        return self._loading.pop(request.sequence_id, None)

    def hold(self, request: Request) -> None:
        request.status = RequestStatus.HELD
        self._held[request.sequence_id] = request

    def orphan(self, request: Request) -> None:
        """A sequence that is being loaded has ended."""
        del self._awaiting[request.sequence_id], self._loading[request.sequence_id]
        self._orphans[request.sequence_id] = request

    def is_orphan(self, sequence_id: str) -> bool:
        return sequence_id in self._orphans

    def has_orphan_of(self, request_id: str) -> bool:
        """Of any choice. May be asked from any thread."""
        return any(orphan.request_id == request_id for orphan in list(self._orphans.values()))

    def pop_orphan(self, sequence_id: str) -> Request:
        request = self._orphans.pop(sequence_id)
        self._uncount(request)
        return request

    def remove(self, request: Request) -> None:
        """Before its blocks are given back."""
        if self._held.pop(request.sequence_id, None) is None:
            del self._awaiting[request.sequence_id]
            self._loading.pop(request.sequence_id, None)
            self._uncount(request)

    def _uncount(self, request: Request) -> None:
        self._tables_of.subtract(request.block_ids)
        for block_id in request.block_ids:
            if not self._tables_of[block_id]:
                del self._tables_of[block_id]
