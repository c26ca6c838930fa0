"""Unfinished puts.

A `Put`'s life: open → committed or aborted (by its writer, with the right fence) → gone; or, when its lease ends first:
open → expired. An expired put blocks no key. Its slots are free at once when its writer is provably dead or writes
through us alone; while a writer that maps our memory lives, stopped or slow, they stay in quarantine until it dies
or says that it is done, because a late write must never reach a slot that was granted again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common.errors import NotFound
from kvstore_svc.chain_index import Block, BlockKey
from kvstore_svc.slab_allocator import Slot


@dataclass(slots=True, eq=False)
class PutSlot:
    """One block of a put: `slot` is held for its bytes, None when the block was there already (then pinned)."""

    key: BlockKey
    parent: BlockKey
    slot: Slot | None
    present: Block | None = None


@dataclass(slots=True, eq=False)
class Put:
    """`busy` counts copies of ours into its slots; it does not expire meanwhile."""

    put_id: str
    fence: int
    writer_id: str
    num_bytes: int  # of each block
    expires_at: float  # monotonic
    slots: list[PutSlot] = field(default_factory=list)
    busy: int = 0

    @property
    def absent(self) -> list[PutSlot]:
        return [slot for slot in self.slots if slot.slot is not None]

    @property
    def held_bytes(self) -> int:
        return len(self.absent) * self.num_bytes


class PutLedger:
    """All puts together hold at most `max_held_bytes`, those of one writer half of it; quarantine counts.

    `is_alive(writer_id)`: whether a process of that name may still write into our memory.
    """

    def __init__(self, max_held_bytes: int, is_alive: Callable[[str], bool]) -> None:
        self._max_held_bytes, self._is_alive = max_held_bytes, is_alive
        self._open: dict[str, Put] = {}
        self._quarantined: dict[str, Put] = {}
        self._last_fence = 0

    def room_bytes(self, writer_id: str) -> int:
        """How much more this writer may hold."""
        held = held_by_writer = 0
        for put in (*self._open.values(), *self._quarantined.values()):
            held += put.held_bytes
            held_by_writer += put.held_bytes if put.writer_id == writer_id else 0
        return min(self._max_held_bytes - held, self._max_held_bytes // 2 - held_by_writer)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_quarantined(self) -> int:
        """Slots."""
        return sum(len(put.absent) for put in self._quarantined.values())

    def open(self, writer_id: str, num_bytes: int, lease_s: float) -> Put:
        """A new put without slots; the store fills them in."""
        self._last_fence += 1
        put = Put(secrets.token_hex(8), self._last_fence, writer_id, num_bytes, time.monotonic() + lease_s)
        self._open[put.put_id] = put
        return put

    def find(self, put_id: str, fence: int) -> Put:
        """An open put. Raises `NotFound` when it has ended or expired, or the fence is another's."""
        put = self._open.get(put_id)
        if put is None or put.fence != fence:
            raise NotFound(f"put {put_id!r} (fence {fence}) is not open: its lease has ended", param="put_id")
        return put

    def close(self, put_id: str, fence: int) -> tuple[Put | None, bool]:
        """End a put in any state, its writer being done: (the put or None, whether it was still open)."""
        for puts, was_open in ((self._open, True), (self._quarantined, False)):
            put = puts.get(put_id)
            if put is not None and put.fence == fence:
                return puts.pop(put_id), was_open
        return None, False

    def expire(self, now: float) -> tuple[list[Put], list[Put]]:
        """(Puts whose lease has just ended, puts whose slots are free now)."""
        ended = [put for put in self._open.values() if put.expires_at <= now and not put.busy]
        for put in ended:
            self._quarantined[put.put_id] = self._open.pop(put.put_id)
        free = [put for put in self._quarantined.values() if not self._is_alive(put.writer_id)]
        for put in free:
            del self._quarantined[put.put_id]
        return ended, free
