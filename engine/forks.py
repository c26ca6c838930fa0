"""The further choices of a request with n > 1: they share the KV of its prompt, which the first choice computes.

A fork:  PENDING ──the first choice has the prompt's KV──▶ SHARED ──the last choice has begun──▶ gone
                                                             └──its blocks are needed, or stand still──▶ gone

While SHARED the fork itself holds the blocks of the prompt but its last token. A choice that begins takes the full
ones by reference and a copy of the partly filled one, and computes the prompt's last token by itself: so what it draws
depends on its index alone. Where the blocks are taken away from a fork, its choices go to the front of the queue and
find their prompt in the prefix cache, or compute it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.block_manager import BlockManager
from engine.request import Request
from engine.step import BlockCopy


class Fork:
    """One request's choices. `waiting` are FORKING; `num_live` counts all that have not ended."""

    def __init__(self, first: Request, others: list[Request]) -> None:
        self.first = first
        self.waiting = deque(others)
        self.live = {request.sequence_id: request for request in (first, *others)}
        self.table: tuple[int, ...] = ()  # covers `num_tokens`; empty while pending
        self.num_tokens = first.num_prompt_tokens - 1
        self.is_shared = False


class Forks:
    """Owns the FORKING sequences and the blocks of the forks."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._of: dict[str, Fork] = {}  # by request id, until all choices have ended
        self._shared: dict[str, Fork] = {}  # SHARED ones, oldest first

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._of

    def __bool__(self) -> bool:
        """Whether choices may begin."""
        return bool(self._shared)

    @property
    def num_waiting(self) -> int:
        return sum(len(fork.waiting) for fork in self._of.values())

    def add(self, first: Request, others: list[Request]) -> None:
        self._of[first.request_id] = Fork(first, others)

    def choices(self, request: Request) -> list[Request]:
        """All live sequences of a request, by any one of them."""
        fork = self._of.get(request.request_id)
        return [request] if fork is None else list(fork.live.values())

    def live(self, request_id: str) -> list[Request]:
        fork = self._of.get(request_id)
        return [] if fork is None else list(fork.live.values())

    def first(self, request: Request) -> Request:
        """The choice that computes the prompt of a further one; it may have ended."""
        return self._of[request.request_id].first

    def offer(self, request: Request) -> None:
        """A sequence has made progress: if it is a first choice and has the prompt's KV, the others may begin."""
        fork = self._of.get(request.request_id)
        if fork is None or fork.first is not request or not fork.waiting or fork.is_shared:
            return
        if request.num_computed_tokens >= fork.num_tokens:
            fork.is_shared = True
            fork.table = self._blocks.share_head(request, fork.num_tokens)
            self._shared[request.request_id] = fork

    def next_waiting(self) -> Iterator[Fork]:
        """Forks with choices that may begin, oldest first; safe against `begin`."""
        return iter(list(self._shared.values()))

    def begin(self, fork: Fork) -> tuple[Request, list[BlockCopy]] | None:
        """Give the next choice of a shared fork its blocks; None where the pool has too few.

        The copy's source has a reference of its own, to be released once the step that copies has retired.
        """
        request = fork.waiting[0]
        copies = self._blocks.fork(request, fork.table, fork.num_tokens)
        if copies is None:
            return None
        fork.waiting.popleft()
        request.set_computed(fork.num_tokens)
        if not fork.waiting:
            self._unshare(fork)
        return request, copies

    def drop_latest(self) -> list[Request]:
        """Take the blocks of the latest shared fork; its choices, which have to be queued now."""
        fork = next(reversed(self._shared.values()))
        dropped = list(fork.waiting)
        fork.waiting.clear()
        self._unshare(fork)
        return dropped

    def end(self, request: Request) -> None:
        """A choice has ended."""
        fork = self._of.get(request.request_id)
        if fork is None:
            return
        del fork.live[request.sequence_id]
        if request in fork.waiting:
            fork.waiting.remove(request)
        if fork.is_shared and not fork.waiting:
            self._unshare(fork)
        if not fork.live:
            del self._of[request.request_id]

    def tables(self) -> list[tuple[int, ...]]:
        return [fork.table for fork in self._shared.values()]

    def _unshare(self, fork: Fork) -> None:
        if self._shared.pop(fork.first.request_id, None) is not None:
            self._blocks.release_table(fork.table)
            fork.table = ()
