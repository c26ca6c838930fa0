"""A store node's work: chains of immutable blocks in and out.

Put: `begin_put` (absent blocks get slots, present ones are pinned) → the writer fills the slots → `commit_put`; never
seen by anyone before the commit. The first commit of a key wins; a later one of the same key only gives its slot back.
Get: `get` (the longest present prefix, brought into DRAM and leased) → the reader copies → `release`.
What a writer or reader does not end, `sweep` ends with its lease.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from common import logs
from common.block_hash import HASH_BYTES, BlockHash
from common.blocks.checksum import checksum
from common.blocks.copy import copy_blocks
from common.errors import InvalidRequest, NotFound
from kvstore_svc.block_pool import BlockPool
from kvstore_svc.chain_index import Block, BlockKey, Tier
from kvstore_svc.lease_ledger import Lease, LeaseLedger
from kvstore_svc.put_ledger import Put, PutLedger, PutSlot
from kvstore_svc.slab_allocator import Slot
from kvstore_svc.tier_mover import TierMover

log = logs.get(__name__)


@dataclass(slots=True)
class StoreCounters:
    """Since the start, in blocks; `num_expired` in puts."""

    num_put: int = 0
    num_put_present: int = 0
    num_missed: int = 0
    num_hits_dram: int = 0
    num_hits_ssd: int = 0
    num_expired: int = 0


class BlockStore:
    """Owned by the event loop. `sweep` must be called now and then."""

    def __init__(
        self, pool: BlockPool, mover: TierMover, puts: PutLedger, *, max_lease_s: float, max_leased_bytes: int
    ) -> None:
        self._pool, self._mover, self._puts = pool, mover, puts
        self._leases = LeaseLedger()
        self._max_lease_s, self._max_leased_bytes = max_lease_s, max_leased_bytes
        self.counters = StoreCounters()

    @property
    def num_leased(self) -> int:
        return self._leases.num_blocks

    def lookup(self, keys: Sequence[BlockKey]) -> list[Tier]:
        """The best tier of each block of the longest present prefix."""
        return [_tier(block) for block in self._pool.index.prefix(keys)]

    async def get(self, keys: Sequence[BlockKey], lease_s: float) -> Lease | None:
        """Lease the longest prefix that is present and that DRAM has room for; None when there is none."""
        present = self._pool.index.prefix(keys)
        blocks = self._leasable(present)
        in_ssd = [Tier.DRAM not in block.slots for block in blocks]
        for block in blocks:
            self._pool.pin(block)
        num_ready = 0
        try:
            self._pool.index.touch(blocks)
            for block in blocks:
                if not await self._mover.promote(block):
                    break
                num_ready += 1
        except BaseException:
            num_ready = 0
            raise
        finally:
            for block in blocks[num_ready:]:
                self._pool.unpin(block)
        self.counters.num_missed += len(keys) - num_ready
        self.counters.num_hits_ssd += sum(in_ssd[:num_ready])
        self.counters.num_hits_dram += num_ready - sum(in_ssd[:num_ready])
        if not num_ready:
            return None
        more = num_ready < len(present) and not present[num_ready].condemned
        return self._leases.grant(blocks[:num_ready], in_ssd[:num_ready], self._lease_s(lease_s), more)

    def _leasable(self, blocks: list[Block]) -> list[Block]:
        room = self._max_leased_bytes - self._leases.leased_bytes
        for count, block in enumerate(blocks):
            room -= block.num_bytes
            if room < 0:
                return blocks[:count]
        return blocks

    async def release(self, lease_id: str, corrupt: Sequence[BlockHash] = ()) -> None:
        """End a lease. Blocks that the reader found `corrupt` are checked first. Idempotent."""
        lease = self._leases.release(lease_id)
        if lease is None:
            return
        try:
            for block in lease.blocks:
                if block.key[HASH_BYTES:] in corrupt:
                    await self._mover.verify(block)
        finally:
            self._unpin(lease.blocks)

    async def read(self, lease_id: str) -> AsyncIterator[tuple[Block, bytes]]:
        """The leased blocks' bytes, in order. Raises `NotFound` when the lease has ended."""
        blocks = self._leases.find(lease_id).blocks
        for block in blocks:
            self._pool.pin(block)
        try:
            for block in blocks:
                yield block, bytes(self.view(block))
        finally:
            self._unpin(blocks)

    async def begin_put(
        self, keys: Sequence[BlockKey], parent: BlockKey, num_bytes: int, writer_id: str, lease_s: float
    ) -> Put:
        """Slots for the absent blocks of a chain that follows `parent`, as far as there is room.

        A put without absent blocks is over at once. Raises `InvalidRequest` for a block size that no
        tier can hold, or that is not the one known for a key.
        """
        if num_bytes < 1 or not self._pool.fits(Tier.DRAM, num_bytes):
            raise InvalidRequest(f"block_bytes: a block of {num_bytes} bytes fits into no slab", param="block_bytes")
        room = self._puts.room_bytes(writer_id)
        put = self._puts.open(writer_id, num_bytes, self._lease_s(lease_s))
        put.busy += 1  # does not expire while we wait for room
        try:
            for key in keys:
                slot = await self._put_slot(key, parent, put, room)
                if slot is None:
                    break
                put.slots.append(slot)
                parent = key
        except BaseException:
            self._end(put)
            raise
        finally:
            put.busy -= 1
        self._pool.index.touch([slot.present for slot in put.slots if slot.present is not None])
        if not put.absent:
            self.counters.num_put_present += len(put.slots)
            self._end(put)
        return put

    async def _put_slot(self, key: BlockKey, parent: BlockKey, put: Put, room: int) -> PutSlot | None:
        block = self._pool.index.get(key)
        if block is None:
            slot = await self._mover.hold_dram(put.num_bytes) if put.held_bytes + put.num_bytes <= room else None
            if slot is None:
                return None
            block = self._pool.index.get(key)
            if block is None:
                return PutSlot(key, parent, slot)
            self._pool.give_back(Tier.DRAM, slot)  # came while we waited
        if block.num_bytes != put.num_bytes:
            raise InvalidRequest(f"block_bytes: block {key.hex()} has {block.num_bytes} bytes, not {put.num_bytes}",
                                 param="block_bytes")
        self._pool.pin(block)
        return PutSlot(key, parent, None, block)

    def write(self, put_id: str, fence: int, index: int, block_hash: BlockHash, payload: bytes, crc: int) -> None:
        """Fill the slot of the `index`-th absent block of an open put, for a writer on another host.

        Raises `InvalidRequest` for wrong bytes or a block out of order.
        """
        put = self._puts.find(put_id, fence)
        absent = put.absent
        if index >= len(absent) or absent[index].key[HASH_BYTES:] != block_hash:
            raise InvalidRequest(f"block_hash: {block_hash.hex()} is not absent block {index} of this put",
                                 param="block_hash")
        if len(payload) != put.num_bytes or checksum(payload) != crc:
            raise InvalidRequest(f"payload: {len(payload)} bytes that do not match their size or checksum",
                                 param="payload")
        slot = absent[index].slot
        assert slot is not None
        copy_blocks([(self._mover.view(slot, put.num_bytes), memoryview(payload))])

    def commit_put(self, put_id: str, fence: int, checksums: Sequence[int]) -> int:
        """Make the first `len(checksums)` absent blocks of a put public and give up the rest; returns how many.

        Raises `NotFound` when the put has ended or its lease has: then nothing is stored.
        """
        put, was_open = self._puts.close(put_id, fence)
        if put is None:
            raise NotFound(f"put {put_id!r} (fence {fence}) is not open: its lease has ended", param="put_id")
        if not was_open or len(checksums) > len(put.absent):
            self._free(put)
            if was_open:
                raise InvalidRequest(f"checksums: {len(checksums)} for {len(put.absent)} blocks", param="checksums")
            raise NotFound(f"put {put_id!r} has expired", param="put_id")
        stored = []
        for slot, crc in zip(put.absent, checksums, strict=False):
            if slot.slot is not None and self._pool.index.get(slot.key) is None:
                block = Block(slot.key, slot.parent, put.num_bytes, crc)
                self._pool.store(Tier.DRAM, slot.slot, block)
                slot.slot, slot.present = None, block
                self._pool.pin(block)
                stored.append(block)
        found = [self._pool.index.get(slot.key) for slot in put.slots]
        self._pool.index.touch([block for block in found if block is not None])
        self._free(put)
        self.counters.num_put += len(stored)
        self._mover.note_stored(stored)
        return len(stored)

    def abort_put(self, put_id: str, fence: int) -> None:
        """The writer is done and stores nothing. Idempotent."""
        put, _ = self._puts.close(put_id, fence)
        if put is not None:
            self._free(put)

    def sweep(self) -> None:
        """End what its lease has ended."""
        now = time.monotonic()
        for lease in self._leases.expire(now):
            self._unpin(lease.blocks)
        ended, free = self._puts.expire(now)
        self.counters.num_expired += len(ended)
        for put in ended:
            log.warning("put_expired", writer=put.writer_id, num_blocks=len(put.absent))
            self._unpin_present(put)
        for put in free:
            self._free(put)

    async def evict(self, hashes: Sequence[BlockHash] = ()) -> int:
        """Take blocks (of any model; none given: all) out of both tiers, leaf first, but for those in use."""
        asked = set(hashes)
        slots: list[Slot] = []
        num_evicted, progress = 0, True
        while progress:
            progress = False
            for block in self._pool.index.oldest_first():
                if block.num_pins or (asked and block.key[HASH_BYTES:] not in asked):
                    continue
                if any(self._pool.index.has_child(block, tier) for tier in Tier):
                    continue
                if Tier.SSD in block.slots:
                    slots.append(self._pool.withdraw(block, Tier.SSD))
                if Tier.DRAM in block.slots:
                    self._pool.evict(block, Tier.DRAM)
                num_evicted, progress = num_evicted + 1, True
        await self._mover.erase(slots)
        return num_evicted

    def offset(self, slot: Slot, num_bytes: int) -> int:
        """Where a DRAM slot lies in the segment."""
        return self._mover.offset(slot, num_bytes)

    def view(self, block: Block) -> memoryview:
        """The bytes of a leased block."""
        return self._mover.view(block.slots[Tier.DRAM], block.num_bytes)

    def _lease_s(self, asked_s: float) -> float:
        return min(asked_s, self._max_lease_s) if asked_s > 0 else self._max_lease_s

    def _end(self, put: Put) -> None:
        self._puts.close(put.put_id, put.fence)
        self._free(put)

    def _free(self, put: Put) -> None:
        for slot in put.absent:
            if slot.slot is not None:
                self._pool.give_back(Tier.DRAM, slot.slot)
                slot.slot = None
        self._unpin_present(put)

    def _unpin_present(self, put: Put) -> None:
        for slot in put.slots:
            if slot.present is not None:
                self._pool.unpin(slot.present)
                slot.present = None

    def _unpin(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._pool.unpin(block)


def _tier(block: Block) -> Tier:
    return Tier.DRAM if Tier.DRAM in block.slots else Tier.SSD
