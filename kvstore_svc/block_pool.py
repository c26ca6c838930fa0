"""The slots of both tiers and the blocks in them, with one owner for every slot.

Owners of a DRAM slot: free → held (by a put or a promotion, until its bytes are whole) → a block → free. A pin keeps a
block's slots; a condemned block (its bytes are wrong) leaves the index at once, its slots when the last pin goes.
`check` sums it up.
"""

from __future__ import annotations

from common.errors import InternalError
from kvstore_svc.chain_index import Block, ChainIndex, Tier
from kvstore_svc.slab_allocator import SlabAllocator, Slot


class BlockPool:
    """Owned by the event loop; threads only touch the bytes of slots that are held or pinned."""

    def __init__(self, dram: SlabAllocator, ssd: SlabAllocator | None) -> None:
        self.index = ChainIndex()
        self._allocators = {Tier.DRAM: dram} if ssd is None else {Tier.DRAM: dram, Tier.SSD: ssd}
        self._held: dict[Tier, set[Slot]] = {tier: set() for tier in Tier}
        self._condemned: set[Block] = set()  # still pinned
        self.num_evicted = dict.fromkeys(Tier, 0)

    @property
    def has_ssd(self) -> bool:
        return Tier.SSD in self._allocators

    def fits(self, tier: Tier, num_bytes: int) -> bool:
        return tier in self._allocators and self._allocators[tier].fits(num_bytes)

    def used_bytes(self, tier: Tier) -> int:
        return self._allocators[tier].granted_bytes if tier in self._allocators else 0

    def hold(self, tier: Tier, num_bytes: int) -> Slot | None:
        """A free slot for bytes that are about to be written."""
        slot = self._allocators[tier].alloc(num_bytes)
        if slot is not None:
            self._held[tier].add(slot)
        return slot

    def give_back(self, tier: Tier, slot: Slot) -> None:
        """A held slot is not needed after all."""
        self._held[tier].remove(slot)
        self._allocators[tier].free(slot)

    def store(self, tier: Tier, slot: Slot, block: Block) -> None:
        """A held slot's bytes are whole: it is the block's copy in this tier."""
        self._held[tier].remove(slot)
        self.index.place(block, tier, slot)

    def adopt(self, slab: int, stride: int, blocks: dict[int, Block]) -> None:
        """A slab of the SSD tier as an earlier life left it."""
        self._allocators[Tier.SSD].adopt(slab, stride, set(blocks))
        for place, block in blocks.items():
            self.index.place(block, Tier.SSD, Slot(slab, place))

    def evict(self, block: Block, tier: Tier) -> None:
        """Take an unpinned block out of a tier."""
        assert not block.num_pins
        self._allocators[tier].free(self.index.displace(block, tier))
        self.num_evicted[tier] += 1

    def withdraw(self, block: Block, tier: Tier) -> Slot:
        """As `evict`, but the slot stays held until it is given back."""
        assert not block.num_pins
        slot = self.index.displace(block, tier)
        self._held[tier].add(slot)
        self.num_evicted[tier] += 1
        return slot

    def pin(self, block: Block) -> None:
        block.num_pins += 1

    def unpin(self, block: Block) -> None:
        block.num_pins -= 1
        if block.condemned and not block.num_pins:
            self._condemned.discard(block)
            self._free_slots(block)

    def condemn(self, block: Block) -> None:
        """The block's bytes are wrong: nobody finds it any more. Idempotent."""
        if block.condemned:
            return
        block.condemned = True
        slots = dict(block.slots)
        for tier in slots:
            self.index.displace(block, tier)
        block.slots = slots
        self._condemned.add(block)
        if not block.num_pins:
            self._condemned.discard(block)
            self._free_slots(block)

    def check(self) -> None:
        """Raises `InternalError` unless every granted slot has exactly one owner."""
        for tier, allocator in self._allocators.items():
            owned = [block.slots[tier] for block in (*self.index, *self._condemned) if tier in block.slots]
            owned += self._held[tier]
            if len(owned) != len(set(owned)) or len(owned) != allocator.num_granted:
                raise InternalError(f"{tier} ledger: {allocator.num_granted} slots granted, {len(owned)} owned "
                                    f"({len(set(owned))} different)")

    def num_held(self, tier: Tier) -> int:
        return len(self._held[tier])

    def _free_slots(self, block: Block) -> None:
        for tier, slot in block.slots.items():
            self._allocators[tier].free(slot)
        block.slots = {}
