"""Head norms, rotary positions and the KV write, over the fused QKV output of one matrix product.

Q is changed in place; K and V go straight to their slots of the block-major cache. K stays in place too where it is
asked for, else it is not needed after. Norm (RMS, per head), then `x * cos + roll(x, half) * signed sin`, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def reference(
    qkv: torch.Tensor, head_norms: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, num_kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkv` [num_tokens, num_heads + 2 * num_kv_heads, head_dim], `cos` and signed `sin` [max_len, head_dim] float32.

    `head_norms` [num_heads + num_kv_heads, head_dim] → q, k, v.
    """
    turning, v = qkv[:, : -num_kv_heads].float(), qkv[:, -num_kv_heads:]
    if head_norms is not None:
        turning = turning * torch.rsqrt(turning.square().mean(-1, keepdim=True) + eps) * head_norms.float()
    half = qkv.shape[-1] // 2
    turned = turning * cos[positions][:, None] + turning.roll(half, -1) * sin[positions][:, None]
    turned = turned.to(qkv.dtype)
    return turned[:, : -num_kv_heads], turned[:, -num_kv_heads:], v


@triton.jit
def _kernel(
    qkv_ptr,  # [num_tokens, num_heads + 2 * num_kv_heads, 2 * HALF]
    norms_ptr,  # [num_heads + num_kv_heads, 2 * HALF]
    cos_ptr, sin_ptr,  # [max_len, 2 * HALF] float32
    positions_ptr,  # [num_tokens] int32
    slots_ptr,  # [num_tokens] int64, block * block_size + offset; -1: the token is not kept
    cache_ptr,  # this layer's [num_blocks, 2, num_kv_heads, block_size, 2 * HALF], blocks `block_stride` apart
    block_stride, num_heads, num_kv_heads, block_size, eps,
    HAS_NORMS: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KEEPS_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_turning = num_heads + num_kv_heads
    num_all = num_turning + num_kv_heads
    exists = heads < num_all
    d = tl.arange(0, HALF)
    at = (token * num_all + heads)[:, None] * (2 * HALF) + d[None, :]
    low = tl.load(qkv_ptr + at, mask=exists[:, None], other=0.0)
    high = tl.load(qkv_ptr + at + HALF, mask=exists[:, None], other=0.0)
    turns = heads < num_turning
    a, b = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)
        norm_at = heads[:, None] * (2 * HALF) + d[None, :]
        weight_a = tl.load(norms_ptr + norm_at, mask=turns[:, None], other=1.0).to(tl.float32)
        weight_b = tl.load(norms_ptr + norm_at + HALF, mask=turns[:, None], other=1.0).to(tl.float32)
        a = a * scale[:, None] * weight_a
        b = b * scale[:, None] * weight_b
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * 2 * HALF + d)[None, :]
    sin = tl.load(sin_ptr + position * 2 * HALF + HALF + d)[None, :]
    new_low = tl.where(turns[:, None], (a * cos - b * sin).to(low.dtype), low)
    new_high = tl.where(turns[:, None], (b * cos + a * sin).to(low.dtype), high)

    stays = turns if KEEPS_K else heads < num_heads
    tl.store(qkv_ptr + at, new_low, mask=stays[:, None])
    tl.store(qkv_ptr + at + HALF, new_high, mask=stays[:, None])
    slot = tl.load(slots_ptr + token)
    kept = (heads >= num_heads) & exists & (slot >= 0)
    is_v = heads >= num_turning
    kv_head = tl.where(is_v, heads - num_turning, heads - num_heads)
    strip = slot // block_size * block_stride + (
        (is_v.to(tl.int64) * num_kv_heads + kv_head) * block_size + slot % block_size) * (2 * HALF)
    cache_at = strip[:, None] + d[None, :]
    tl.store(cache_ptr + cache_at, new_low, mask=kept[:, None])
    tl.store(cache_ptr + cache_at + HALF, new_high, mask=kept[:, None])


def rope_write(
    qkv: torch.Tensor, head_norms: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor, slots: torch.Tensor, layer_cache: torch.Tensor, num_heads: int, *, keeps_k: bool = False,
) -> None:
    """`layer_cache`: the view [num_blocks, 2, num_kv_heads, block_size, head_dim] of one layer of the pool.

    `keeps_k`: the turned K is also left in `qkv`.
    """
    num_tokens, num_all, head_dim = qkv.shape
    _, _, num_kv_heads, block_size, _ = layer_cache.shape
    assert num_all == num_heads + 2 * num_kv_heads and qkv.is_contiguous()
    assert layer_cache.stride(1) == num_kv_heads * block_size * head_dim and layer_cache.stride(4) == 1
    assert slots.dtype == torch.int64 and positions.dtype == torch.int32 and cos.dtype == torch.float32
    heads = 8 if num_tokens >= 64 else 4
    _kernel[(num_tokens, triton.cdiv(num_all, heads))](
        qkv, qkv if head_norms is None else head_norms, cos, sin, positions, slots, layer_cache,
        layer_cache.stride(0), num_heads, num_kv_heads, block_size, eps,
        HAS_NORMS=head_norms is not None, HALF=head_dim // 2, HEADS=heads, KEEPS_K=keeps_k,
        num_warps=4 if heads == 8 else 2)
