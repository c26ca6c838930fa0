"""What this router has placed on workers and their load reports cannot know yet.

An entry's life: placed → reported (a report came at least `settle_s` after the placement: the worker counts the
request itself by then) or ended (its outcome came) or expired (`ttl_s`: the caller never sent it, or died). While a
worker sends no reports, its entries stay until they end: with the bus down they are all that is known of its load.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Placed:
    at: float
    tokens: int


class PlacedLedger:
    """Times are the caller's clock, in seconds. At most `max_entries`; the oldest go first."""

    def __init__(self, settle_s: float = 0.3, ttl_s: float = 120.0, max_entries: int = 65_536) -> None:
        self._settle_s, self._ttl_s, self._max_entries = settle_s, ttl_s, max_entries
        self._by_worker: dict[str, dict[str, _Placed]] = {}  # worker → request → entry, oldest first
        self._num_entries = 0

    @property
    def num_entries(self) -> int:
        return self._num_entries

    def place(self, worker_id: str, request_id: str, tokens: int, now: float) -> None:
        """`tokens`: of the prompt, to be computed on that worker."""
        entries = self._by_worker.setdefault(worker_id, {})
        self._num_entries += request_id not in entries
        entries[request_id] = _Placed(now, tokens)
        if self._num_entries > self._max_entries:
            self._drop_oldest()

    def reported(self, worker_id: str, at: float) -> None:
        """A report of the worker was made about `at`."""
        self._keep(worker_id, newer_than=at - self._settle_s)

    def ended(self, request_id: str, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            if self._by_worker.get(worker_id, {}).pop(request_id, None) is not None:
                self._num_entries -= 1

    def forget(self, worker_id: str) -> None:
        self._num_entries -= len(self._by_worker.pop(worker_id, ()))

    def count(self, worker_id: str, now: float) -> tuple[int, int]:
        """Requests and prompt tokens placed there and not known otherwise."""
        self._keep(worker_id, newer_than=now - self._ttl_s)
        entries = self._by_worker.get(worker_id, {})
        return len(entries), sum(entry.tokens for entry in entries.values())

    def _keep(self, worker_id: str, newer_than: float) -> None:
        entries = self._by_worker.get(worker_id)
        while entries:
            request_id, entry = next(iter(entries.items()))
            if entry.at > newer_than:
                return
            del entries[request_id]
            self._num_entries -= 1

    def _drop_oldest(self) -> None:
        oldest = min((w for w, entries in self._by_worker.items() if entries),
                     key=lambda w: next(iter(self._by_worker[w].values())).at)
        entries = self._by_worker[oldest]
        del entries[next(iter(entries))]
        self._num_entries -= 1
