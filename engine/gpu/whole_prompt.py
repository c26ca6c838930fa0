"""Attention of a prompt that one step computes whole, by torch's kernel where that is faster on this GPU.

Only for one length, that of a step with nothing else in it: a library's kernel is planned anew for each length, which
takes longer than it saves. Long prompts are computed in steps of this length, and the first of them begins at 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.gpu.device_state import DeviceState
from kernels.extend_attention import extend_attention, make_tiles

_ROUNDS = 5


def whole_prompt_attention(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, scale: float) -> torch.Tensor:
    """`qkv` [num_tokens, num_heads + 2 * num_kv_heads, head_dim], Q and K turned → [num_tokens, num_heads, head_dim].
    """
    q, k, v = (part.transpose(0, 1)[None] for part in torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).contiguous()


def measured_s(state: DeviceState, num_tokens: int) -> tuple[float, float]:
    """Seconds of a layer's attention by torch and by our kernel. Reads blocks 0 and up, which must be there."""
    decoder, sizes, scale = state.decoder, state.decoder.sizes, state.decoder.decoder.layers[0].attention.scale
    cache, block_size = decoder.cache, state.block_size
    num_blocks = -(-num_tokens // block_size)
    qkv = torch.randn(num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim, device=cache.device)
    qkv = qkv.to(cache.dtype)
    out = torch.empty(num_tokens, sizes.num_heads, sizes.head_dim, dtype=cache.dtype, device=cache.device)
    table = torch.arange(num_blocks, dtype=torch.int32, device=cache.device)[None]
    tiles = make_tiles([0], [0], [0], [num_tokens], sizes.num_heads // sizes.num_kv_heads).to(cache.device)
    return (_seconds(lambda: whole_prompt_attention(qkv, sizes.num_heads, sizes.num_kv_heads, scale)),
            _seconds(lambda: extend_attention(qkv, cache, state.strips, 0, table, tiles, scale, out)))


def _seconds(act: Callable[[], object]) -> float:
    """Of the fastest of some rounds."""
    act()
    times: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        act()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)
