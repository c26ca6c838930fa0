"""Which slots of a tier are free, for blocks of several sizes in one space.

A slab's life: free → of one stride (its first slot was granted) → free again (its last slot was given back). Only a
free slab changes its stride, so blocks of different models share the space without fragments smaller than a slot.
The slab idea is Bonwick's (USENIX 1994), as memcached uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

_SMALL_ALIGN: Final = 64
_PAGE: Final = 4096


class Slot(NamedTuple):
    """The place of one block in its tier."""

    slab: int
    place: int


def stride_of(num_bytes: int) -> int:
    """The distance of slots that hold blocks of `num_bytes`: whole pages, but for small blocks."""
    align = _PAGE if num_bytes >= 16 * _PAGE else _SMALL_ALIGN
    return -(-num_bytes // align) * align


class SlabAllocator:
    """`num_slots(stride)` says how many slots of a stride a slab has; 0 = such a block does not fit."""

    def __init__(self, num_slabs: int, num_slots: Callable[[int], int]) -> None:
        self._num_slots = num_slots
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        self._strides = [0] * num_slabs  # 0 = free
        self._free: dict[int, set[int]] = {}  # slab → free slots, for slabs in use
        self._open: dict[int, set[int]] = {}  # stride → slabs that have a free slot
        self.num_granted = 0
        self.granted_bytes = 0  # by stride

    def fits(self, num_bytes: int) -> bool:
        """Whether a block of this size can be held at all."""
        return self._num_slots(stride_of(num_bytes)) > 0

    def alloc(self, num_bytes: int) -> Slot | None:
        """A free slot for a block of this size; None when something must be freed first."""
        stride = stride_of(num_bytes)
        if not self._open.get(stride):
            if not self._free_slabs or not self._num_slots(stride):
                return None
            self._assign(self._free_slabs.pop(), stride)
        slab = next(iter(self._open[stride]))
        place = self._free[slab].pop()
        self._account(slab, 1)
        return Slot(slab, place)

    def adopt(self, slab: int, stride: int, used: set[int]) -> None:
        """Take a free slab as found: of this stride, with these slots granted (at least one)."""
        self._free_slabs.remove(slab)
        self._assign(slab, stride)
        self._free[slab] -= used
        self._account(slab, len(used))

    def free(self, slot: Slot) -> None:
        """Give a granted slot back. Raises `ValueError` when it is not granted."""
        slab, place = slot
        stride = self._strides[slab]
        if not stride or place in self._free[slab]:
            raise ValueError(f"{slot} is not granted")
        self._free[slab].add(place)
        self._account(slab, -1)
        if len(self._free[slab]) == self._num_slots(stride):
            self._open[stride].discard(slab)
            self._strides[slab] = 0
            del self._free[slab]
            self._free_slabs.append(slab)

    def _assign(self, slab: int, stride: int) -> None:
        self._strides[slab] = stride
        self._free[slab] = set(range(self._num_slots(stride)))
        self._open.setdefault(stride, set()).add(slab)

    def _account(self, slab: int, num_slots: int) -> None:
        stride = self._strides[slab]
        self.num_granted += num_slots
        self.granted_bytes += num_slots * stride
        if self._free[slab]:
            self._open[stride].add(slab)
        else:
            self._open[stride].discard(slab)
