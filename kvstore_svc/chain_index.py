"""Which blocks there are, in which tier, and which goes first when room is needed.

A `Block`'s life: placed in DRAM → in DRAM and on SSD ⇄ on SSD alone → displaced from its last tier (gone). While it has
pins (a lease, an unfinished put, a copy under way) it stays where it is.

Order: least recently used first, and a use of a block uses its ancestors after it, so children come before their
parents. On top, a block with a child in the same tier never goes, nor one that would leave the store while a child
stays: parents outlive children.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore_svc.slab_allocator import Slot

BlockKey = bytes  # 16 bytes of the fingerprint's digest, then the block hash


class Tier(StrEnum):
    DRAM = "dram"
    SSD = "ssd"


_OTHER = {Tier.DRAM: Tier.SSD, Tier.SSD: Tier.DRAM}


@dataclass(slots=True, eq=False)
class Block:
    """One immutable block. `condemned`: no longer in the index; its slots are freed with its last pin."""

    key: BlockKey
    parent: BlockKey
    num_bytes: int
    checksum: int
    slots: dict[Tier, Slot] = field(default_factory=dict)
    num_pins: int = 0
    condemned: bool = False


class ChainIndex:
    """All blocks of a store node. Owned by one thread."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, Block] = {}
        self._order: dict[Tier, OrderedDict[BlockKey, None]] = {tier: OrderedDict() for tier in Tier}
        self._num_children: dict[Tier, Counter[BlockKey]] = {tier: Counter() for tier in Tier}

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def prefix(self, keys: Sequence[BlockKey]) -> list[Block]:
        """The blocks of the longest present prefix of a chain."""
        found: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_blocks(self, tier: Tier) -> int:
        return len(self._order[tier])

    def has_child(self, block: Block, tier: Tier) -> bool:
        return self._num_children[tier][block.key] > 0

    def place(self, block: Block, tier: Tier, slot: Slot) -> None:
        """The block is now in that tier as well; the most recently used there until the next `touch`."""
        assert tier not in block.slots
        assert self._blocks.setdefault(block.key, block) is block
        block.slots[tier] = slot
        self._order[tier][block.key] = None
        self._num_children[tier][block.parent] += 1

    def displace(self, block: Block, tier: Tier) -> Slot:
        """The block is no longer in that tier; gone when it was its last."""
        slot = block.slots.pop(tier)
        del self._order[tier][block.key]
        self._num_children[tier][block.parent] -= 1
        if not self._num_children[tier][block.parent]:
            del self._num_children[tier][block.parent]
        if not block.slots:
            del self._blocks[block.key]
        return slot

    def touch(self, blocks: Sequence[Block]) -> None:
        """A chain, first to last, was used: it and its ancestors become the most recent, ancestors last."""
        for block in reversed(blocks):
            self._move_to_end(block)
        seen = {block.key for block in blocks}
        parent = self._blocks.get(blocks[0].parent) if blocks else None
        while parent is not None and parent.key not in seen:
            seen.add(parent.key)
            self._move_to_end(parent)
            parent = self._blocks.get(parent.parent)

    def victim(self, tier: Tier, may_move: bool = False) -> Block | None:
        """What should leave the tier next. `may_move`: a block that is in this tier alone moves to the other one."""
        other = _OTHER[tier]
        for key in self._order[tier]:
            block = self._blocks[key]
            if block.num_pins or self.has_child(block, tier):
                continue
            if other in block.slots or may_move or not self.has_child(block, other):
                return block
        return None

    def oldest_first(self) -> list[Block]:
        """All blocks; those on SSD first, as children may be there alone."""
        keys = dict.fromkeys([*self._order[Tier.SSD], *self._order[Tier.DRAM]])
        return [self._blocks[key] for key in keys]

    def settle(self) -> None:
        """Order blocks that have no history (found on SSD): children before their parents."""
        depths: dict[BlockKey, int] = {}
        for key in self._blocks:
            path: list[BlockKey] = []
            at = key
            while at not in depths and at in self._blocks:
                path.append(at)
                at = self._blocks[at].parent
            depth = depths.get(at, 0)
            for step, ancestor in enumerate(reversed(path), 1):
                depths[ancestor] = depth + step
        for key in sorted(self._blocks, key=lambda key: -depths[key]):
            self._move_to_end(self._blocks[key])

    def _move_to_end(self, block: Block) -> None:
        for tier in block.slots:
            self._order[tier].move_to_end(block.key)
