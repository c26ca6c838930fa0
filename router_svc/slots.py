"""A bit for each worker, so that sets of workers are integers.

A slot's life: free → taken by a worker id → free again, when the worker is forgotten. Whoever keeps masks must have
dropped the worker's bit from them before its slot is freed.
"""

from __future__ import annotations

from collections.abc import Iterator


class WorkerSlots:
    """Low bits are reused first, so masks stay as short as the number of live workers allows."""

    def __init__(self) -> None:
        self._slot_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}

    def get(self, worker_id: str) -> int | None:
        return self._slot_of.get(worker_id)

    def take(self, worker_id: str) -> int:
        """The worker's slot; the lowest free one when it has none yet."""
        slot = self._slot_of.get(worker_id)
        if slot is None:
            slot = next(i for i in range(len(self._name_of) + 1) if i not in self._name_of)
            self._slot_of[worker_id] = slot
            self._name_of[slot] = worker_id
        return slot

    def free(self, worker_id: str) -> None:
        slot = self._slot_of.pop(worker_id, None)
        if slot is not None:
            del self._name_of[slot]

    def names(self, mask: int) -> Iterator[str]:
        """The workers in `mask`, lowest slot first."""
        while mask:
            low = mask & -mask
            yield self._name_of[low.bit_length() - 1]
            mask ^= low
