"""What the SSD tier held when the process before this one ended."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_svc.block_pool import BlockPool
from kvstore_svc.chain_index import Block
from kvstore_svc.disk_tier import FoundSlab


def recover(pool: BlockPool, slabs: Sequence[FoundSlab]) -> int:
    """Put the found blocks into an empty pool; returns how many. Their bytes are checked when they are read.

    A block that was evicted and stored again may have two headers: one copy is kept, the other slot is free.
    """
    num_blocks = 0
    for slab in slabs:
        blocks: dict[int, Block] = {}
        seen: set[bytes] = set()
        for place, header in slab.headers.items():
            if pool.index.get(header.key) is None and header.key not in seen:
                seen.add(header.key)
                blocks[place] = Block(header.key, header.parent, header.num_bytes, header.checksum)
        if blocks:
            pool.adopt(slab.slab, slab.stride, blocks)
            num_blocks += len(blocks)
    pool.index.settle()
    return num_blocks
