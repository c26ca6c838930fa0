"""What workers will hold soon, because a request was just placed there: guesses that end by themselves.

An entry's life: placed → expired (`ttl_s` later), or dropped with its worker. Entries are never mirrored and never
named as a source of blocks; they only keep requests that share a prefix together until the worker's own event comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from common.block_hash import BlockHash


class SpeculativeOverlay:
    """At most `max_entries` (worker, block) pairs; the oldest go first. Times are the caller's clock, in seconds."""

    def __init__(self, ttl_s: float, max_entries: int) -> None:
        self._ttl_s, self._max_entries = ttl_s, max_entries
        self._until: dict[BlockHash, dict[str, float]] = {}
        self._queue: deque[tuple[float, str, Sequence[BlockHash]]] = deque()  # by expiry
        self._num_queued = 0

    def place(self, worker_id: str, hashes: Sequence[BlockHash], now: float) -> None:
        until = now + self._ttl_s
        for block_hash in hashes:
            self._until.setdefault(block_hash, {})[worker_id] = until
        self._queue.append((until, worker_id, hashes))
        self._num_queued += len(hashes)
        self.expire(now)

    def workers(self, block_hash: BlockHash) -> tuple[str, ...]:
        """Workers expected to hold the block; as of the last `expire`."""
        return tuple(self._until.get(block_hash, ()))

    def expire(self, now: float) -> None:
        while self._queue and (self._queue[0][0] <= now or self._num_queued > self._max_entries):
            until, worker_id, hashes = self._queue.popleft()
            self._num_queued -= len(hashes)
            for block_hash in hashes:
                if self._until.get(block_hash, {}).get(worker_id) == until:  # not placed again since
                    self._remove(block_hash, worker_id)

    def drop(self, worker_id: str) -> None:
        """The worker is gone, or has lost its cache. O(overlay)."""
        for block_hash in [h for h, workers in self._until.items() if worker_id in workers]:
            self._remove(block_hash, worker_id)

    @property
    def num_entries(self) -> int:
        return sum(map(len, self._until.values()))

    def _remove(self, block_hash: BlockHash, worker_id: str) -> None:
        workers = self._until[block_hash]
        workers.pop(worker_id, None)
        if not workers:
            del self._until[block_hash]
