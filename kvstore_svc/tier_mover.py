"""Moves blocks between the tiers: written through to SSD soon after their put, demoted or dropped for room in DRAM,
promoted for a get.

A stored block's life here: dirty (in DRAM alone, queued) → written through, parents first → clean. Room in DRAM costs a
clean block nothing; a dirty one is demoted before it goes. Bytes move in one thread, and slots change hands on the
event loop only: a slot being read or written is pinned or held, so no eviction can meet a copy.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from common import logs
from common.blocks.checksum import checksum
from common.blocks.segment import Segment
from common.errors import Overloaded
from kvstore_svc.block_pool import BlockPool
from kvstore_svc.chain_index import Block, Tier
from kvstore_svc.disk_format import SlotHeader
from kvstore_svc.disk_tier import DiskTier
from kvstore_svc.slab_allocator import Slot, stride_of

log = logs.get(__name__)
Result = TypeVar("Result")

MAX_WAITS: Final = 16  # for writes to end, to make room for one block


class TierMover:
    """`start` before use, `stop` once: after it the file of the SSD tier is closed."""

    def __init__(self, pool: BlockPool, segment: Segment, slab_bytes: int, disk: DiskTier | None) -> None:
        self._pool, self._segment, self._slab_bytes, self._disk = pool, segment, slab_bytes, disk
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-disk")
        self._dirty: deque[Block] = deque()  # each block once after its put: bounded by the DRAM
        self._wake = asyncio.Event()
        self._writing: set[Block] = set()
        self._written_one = asyncio.Event()  # set, and replaced, when a block leaves `_writing`
        self._promoting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.num_corrupt = self.num_disk_errors = 0

    @property
    def num_unwritten(self) -> int:
        """Blocks in DRAM alone that are to go to SSD."""
        return len(self._dirty) + len(self._writing)

    def start(self) -> None:
        if self._disk is not None:
            self._task = asyncio.create_task(self._write_through())

    async def flush(self) -> None:
        """Return when everything that can be on SSD is there."""
        while self._dirty or self._writing:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)

    def offset(self, slot: Slot, num_bytes: int) -> int:
        """Where in the segment a DRAM slot of blocks of this size lies."""
        return slot.slab * self._slab_bytes + slot.place * stride_of(num_bytes)

    def view(self, slot: Slot, num_bytes: int) -> memoryview:
        return self._segment.view(self.offset(slot, num_bytes), num_bytes)

    def note_stored(self, blocks: Iterable[Block]) -> None:
        """New blocks in DRAM, parents first."""
        if self._disk is not None:
            self._dirty.extend(blocks)
            self._wake.set()

    async def hold_dram(self, num_bytes: int) -> Slot | None:
        """A DRAM slot for a block of this size, made free if need be; None when everything else is pinned."""
        may_demote, num_waits = self._pool.has_ssd, 0
        while True:
            slot = self._pool.hold(Tier.DRAM, num_bytes)
            if slot is not None:
                return await self._reserved(slot, num_bytes)
            victim = self._pool.index.victim(Tier.DRAM, may_demote)
            if victim is None:  # a block that is being written keeps its ancestors, but only for a moment
                if not self._writing or num_waits == MAX_WAITS:
                    return None
                num_waits += 1
                await self._written_one.wait()
            elif Tier.SSD in victim.slots or not may_demote:
                self._pool.evict(victim, Tier.DRAM)
            else:
                may_demote = await self._demote_chain(victim)

    async def promote(self, block: Block) -> bool:
        """Bring a pinned block into DRAM; False when it cannot be, or its bytes are wrong (then it is condemned)."""
        async with self._promoting:
            if Tier.DRAM in block.slots or block.condemned:
                return not block.condemned
            slot = await self.hold_dram(block.num_bytes)
            if slot is None:
                return False
            good = False
            try:
                good = await self._in_thread(self._read, block, self.view(slot, block.num_bytes))
            finally:
                if good and not block.condemned:
                    self._pool.store(Tier.DRAM, slot, block)
                else:
                    self._pool.give_back(Tier.DRAM, slot)
            if not good:
                await self.condemn(block)
            return good and not block.condemned

    async def demote(self, block: Block) -> bool:
        """Write a block that is in DRAM alone to SSD; False when there is no room or the disk fails."""
        if block in self._writing or Tier.DRAM not in block.slots or Tier.SSD in block.slots or block.condemned:
            return True  # on its way, or nothing to do
        slot = self._hold_ssd(block.num_bytes)
        if slot is None or self._disk is None:
            return False
        header = SlotHeader(stride_of(block.num_bytes), block.num_bytes, block.checksum, block.key, block.parent)
        payload = self.view(block.slots[Tier.DRAM], block.num_bytes)
        self._pool.pin(block)
        self._writing.add(block)
        written = False
        try:
            written = await self._in_thread(self._written, slot, header, payload)
        finally:
            self._writing.discard(block)
            self._written_one.set()
            self._written_one = asyncio.Event()
            if written and not block.condemned:
                self._pool.store(Tier.SSD, slot, block)
            else:
                self._pool.give_back(Tier.SSD, slot)
            self._pool.unpin(block)
        return written

    async def _demote_chain(self, block: Block) -> bool:
        """Demote a block after its ancestors, so that a process that dies leaves no child on SSD without its parent."""
        path = [block]
        parent = self._pool.index.get(block.parent)
        while parent is not None and Tier.SSD not in parent.slots:
            path.append(parent)
            parent = self._pool.index.get(parent.parent)
        for each in reversed(path):
            if not await self.demote(each):
                return False
        return True

    async def verify(self, block: Block) -> None:
        """A reader says that a pinned block is wrong: look, and condemn it if so."""
        if Tier.DRAM in block.slots and not block.condemned:
            view = self.view(block.slots[Tier.DRAM], block.num_bytes)
            if await asyncio.to_thread(checksum, view) != block.checksum:
                await self.condemn(block)

    async def condemn(self, block: Block) -> None:
        """Wrong bytes: out of the index now, and out of the file, so that no later life finds it."""
        self.num_corrupt += 1
        log.error("corrupt_block", block=block.key.hex(), tiers=[*block.slots])
        slot = block.slots.get(Tier.SSD)
        self._pool.pin(block)
        self._pool.condemn(block)
        try:
            if slot is not None and self._disk is not None:
                await self._in_thread(self._erased, slot)
        finally:
            self._pool.unpin(block)

    async def erase(self, slots: Sequence[Slot]) -> None:
        """Take the blocks of held SSD slots out of the file, then give the slots back."""
        try:
            if slots:
                await self._in_thread(self._erased, *slots)
        finally:
            for slot in slots:
                self._pool.give_back(Tier.SSD, slot)

    async def _reserved(self, slot: Slot, num_bytes: int) -> Slot | None:
        """The slot with memory behind it; None, and it is given back, when the host has no more."""
        offset = self.offset(slot, num_bytes)
        if self._segment.is_reserved(offset, num_bytes):
            return slot
        try:
            await self._in_thread(self._segment.reserve, offset, num_bytes)
        except BaseException as error:
            self._pool.give_back(Tier.DRAM, slot)
            if not isinstance(error, Overloaded):
                raise
            log.error("dram_tier_has_no_memory", error=error.message)
            return None
        return slot

    def _hold_ssd(self, num_bytes: int) -> Slot | None:
        if not self._pool.fits(Tier.SSD, num_bytes):
            return None
        while True:
            slot = self._pool.hold(Tier.SSD, num_bytes)
            if slot is not None:
                return slot
            victim = self._pool.index.victim(Tier.SSD)
            if victim is None:
                return None
            self._pool.evict(victim, Tier.SSD)

    async def _write_through(self) -> None:
        while True:
            await self._wake.wait()
            while self._dirty:
                try:
                    await self.demote(self._dirty.popleft())
                except Exception:
                    log.exception("write_through_failed")
            self._wake.clear()

    async def _in_thread(self, work: Callable[..., Result], *args: object) -> Result:
        """Runs to its end even if the caller is cancelled, so that no thread touches a slot that was given on."""
        running = asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        cancelled = False
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        return running.result()

    def _read(self, block: Block, into: memoryview) -> bool:
        assert self._disk is not None
        try:
            return self._disk.read(block.slots[Tier.SSD], into) and checksum(into) == block.checksum
        except OSError as error:
            self._disk_failed("read", error)
            return False

    def _written(self, slot: Slot, header: SlotHeader, payload: memoryview) -> bool:
        assert self._disk is not None
        try:
            self._disk.write(slot, header, payload)
        except OSError as error:
            self._disk_failed("write", error)
            return False
        return True

    def _erased(self, *slots: Slot) -> None:
        assert self._disk is not None
        try:
            for slot in slots:
                self._disk.erase(slot)
        except OSError as error:
            self._disk_failed("erase", error)

    def _disk_failed(self, what: str, error: OSError) -> None:
        self.num_disk_errors += 1
        log.error("ssd_tier_failed", call=what, error=str(error))
