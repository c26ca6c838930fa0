"""Whole KV blocks between the pool and a staging buffer, beside torch's indexing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.figures import Figure
from bench.kernels_area.graph_time import Ceilings, moved
from engine.models.parts import Sizes
from kernels.block_copy import gather_blocks, scatter_blocks

_NUM = 64
_FEW = 8  # programs, as beside a forward pass


def measure(sizes: Sizes, ceilings: Ceilings, device: torch.device) -> Iterator[Figure]:
    shape = sizes.num_layers, 2, sizes.num_kv_heads, 64, sizes.head_dim
    pool = torch.randn(4 * _NUM, *shape, device=device, dtype=torch.bfloat16)
    staging = torch.empty(_NUM, *shape, device=device, dtype=torch.bfloat16)
    ids = torch.randperm(len(pool), device=device).view(4, _NUM)
    words = ids.to(torch.int32)
    num_bytes = 2 * staging.numel() * 2
    theirs = [partial(torch.index_select, pool, 0, some, out=staging) for some in ids]
    yield from moved(f"gather {_NUM} blocks", num_bytes,
                     [partial(gather_blocks, pool, some, staging) for some in words], ceilings, "index_select", theirs)
    yield from moved(f"gather {_NUM} blocks, {_FEW} programs", num_bytes,
                     [partial(gather_blocks, pool, some, staging, _FEW) for some in words], ceilings)
    yield from moved(f"scatter {_NUM} blocks", num_bytes,
                     [partial(scatter_blocks, staging, some, pool) for some in words], ceilings, "index_copy_",
                     [partial(pool.index_copy_, 0, some, staging) for some in ids])
