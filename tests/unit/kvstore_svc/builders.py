"""A store node without its wire: small tiers, blocks whose content follows from their key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from common.blocks.checksum import checksum
from common.blocks.segment import Segment
from kvstore_svc.block_pool import BlockPool
from kvstore_svc.chain_index import BlockKey, Tier
from kvstore_svc.disk_tier import DiskTier
from kvstore_svc.put_ledger import Put, PutLedger
from kvstore_svc.slab_allocator import SlabAllocator
from kvstore_svc.ssd_recovery import recover
from kvstore_svc.store import BlockStore
from kvstore_svc.tier_mover import TierMover

BLOCK_BYTES = 4096
SLAB_SLOTS = 2
DRAM_SLAB_BYTES = SLAB_SLOTS * BLOCK_BYTES
SSD_SLAB_BYTES = 4096 + SLAB_SLOTS * BLOCK_BYTES
ROOT = bytes(32)
KEY = bytes(32)


def chain(name: str, length: int, model: str = "m") -> list[BlockKey]:
    """Keys of a chain that starts at the root."""
    digest = hashlib.blake2b(model.encode(), digest_size=16).digest()
    return [digest + hashlib.blake2b(f"{name}/{i}".encode(), digest_size=16).digest() for i in range(length)]


def content(key: BlockKey, num_bytes: int = BLOCK_BYTES) -> bytes:
    return (key * (num_bytes // len(key) + 1))[:num_bytes]


class Rig:
    """Blocks fit `dram_blocks` and `ssd_blocks`; writers in `alive` are alive."""

    def __init__(
        self, folder: Path, *, dram_blocks: int = 8, ssd_blocks: int = 0, max_lease_s: float = 60.0,
        max_leased_blocks: int = 64, max_held_blocks: int = 64,
    ) -> None:
        self.alive: set[str] = set()
        self.disk, ssd = None, None
        if ssd_blocks:
            self.disk = DiskTier.open(
                folder / "tier.ssd", 4096 + ssd_blocks // SLAB_SLOTS * SSD_SLAB_BYTES, SSD_SLAB_BYTES, KEY)
            ssd = SlabAllocator(self.disk.num_slabs, self.disk.num_slots)
        num_slabs = dram_blocks // SLAB_SLOTS
        self.pool = BlockPool(SlabAllocator(num_slabs, lambda stride: DRAM_SLAB_BYTES // stride), ssd)
        self.num_recovered = recover(self.pool, list(self.disk.scan())) if self.disk is not None else 0
        self.segment = Segment.create(folder / "dram.segment", dram_blocks * BLOCK_BYTES)
        self.mover = TierMover(self.pool, self.segment, DRAM_SLAB_BYTES, self.disk)
        self.puts = PutLedger(max_held_blocks * BLOCK_BYTES * 2, self.alive.__contains__)
        self.store = BlockStore(
            self.pool, self.mover, self.puts, max_lease_s=max_lease_s,
            max_leased_bytes=max_leased_blocks * BLOCK_BYTES)

    async def close(self) -> None:
        await self.mover.stop()
        self.segment.unlink()
        self.segment.close()

    async def begin(
        self, keys: Sequence[BlockKey], parent: BlockKey = ROOT, writer: str = "w", lease_s: float = 60.0,
        num_bytes: int = BLOCK_BYTES,
    ) -> Put:
        return await self.store.begin_put(keys, parent, num_bytes, writer, lease_s)

    def fill(self, put: Put) -> list[int]:
        """Write all absent blocks; their checksums."""
        checksums = []
        for slot in put.absent:
            assert slot.slot is not None
            self.mover.view(slot.slot, put.num_bytes)[:] = content(slot.key, put.num_bytes)
            checksums.append(checksum(content(slot.key, put.num_bytes)))
        return checksums

    async def put(
        self, keys: Sequence[BlockKey], parent: BlockKey = ROOT, writer: str = "w", num_bytes: int = BLOCK_BYTES
    ) -> int:
        put = await self.begin(keys, parent, writer, num_bytes=num_bytes)
        return self.store.commit_put(put.put_id, put.fence, self.fill(put)) if put.absent else 0

    async def get(self, keys: Sequence[BlockKey]) -> int:
        """How many blocks come back; each is compared with what was put."""
        lease = await self.store.get(keys, 60.0)
        if lease is None:
            return 0
        for block in lease.blocks:
            assert bytes(self.store.view(block)) == content(block.key, block.num_bytes)
        await self.store.release(lease.lease_id)
        return len(lease.blocks)

    def in_tier(self, keys: Sequence[BlockKey], tier: Tier) -> list[bool]:
        found = [self.pool.index.get(key) for key in keys]
        return [block is not None and tier in block.slots for block in found]

    def flip_dram(self, key: BlockKey) -> None:
        block = self.pool.index.get(key)
        assert block is not None
        self.store.view(block)[7] ^= 1
