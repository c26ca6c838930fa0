"""The pool as the copy engine reads it: strips of [block_size, head_dim], which lie one after another."""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


def strips_of(cache: torch.Tensor) -> TensorDescriptor:
    """Of the pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    The strip of (block, layer, K or V, KV head) is number
    `((block * num_layers + layer) * 2 + is_v) * num_kv_heads + kv_head`.
    """
    assert cache.is_contiguous()
    block_size, head_dim = cache.shape[-2:]
    assert cache.numel() // head_dim < 1 << 31, "the rows of a pool are counted in 32 bits"
    return TensorDescriptor.from_tensor(cache.view(-1, head_dim), [block_size, head_dim])
