"""Attention of decode steps and of prompts, beside torch's on the same numbers without pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from bench.figures import Figure
from bench.kernels_area.graph_time import Ceilings, computed, copies_needed, moved
from engine.models.parts import Sizes
from kernels.block_strips import strips_of
from kernels.decode_attention import DecodeWorkspace, decode_attention, plan_units
from kernels.extend_attention import extend_attention, make_tiles

_BLOCK = 64


def decode(sizes: Sizes, num_seqs: int, context: int, ceilings: Ceilings, device: torch.device) -> Iterator[Figure]:
    """New tokens at position `context` - 1; the peer's keys and values lie in one run for each sequence."""
    per_seq = -(-context // _BLOCK)
    num_bytes = 2 * num_seqs * context * sizes.num_kv_heads * sizes.head_dim * 2
    layers = min(16, copies_needed(num_bytes))
    pool = torch.randn(
        num_seqs * per_seq, layers, 2, sizes.num_kv_heads, _BLOCK, sizes.head_dim, device=device,
        dtype=torch.bfloat16)
    tables = torch.randperm(len(pool), device=device).to(torch.int32).view(num_seqs, per_seq)
    rows = torch.arange(num_seqs, dtype=torch.int32, device=device)
    lens = torch.full((num_seqs,), context, dtype=torch.int32, device=device)
    num_all = sizes.num_heads + 2 * sizes.num_kv_heads
    qkv = torch.randn(num_seqs, num_all, sizes.head_dim, device=device).bfloat16()
    norms = torch.ones(num_all - sizes.num_kv_heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
    cos = torch.rand(context, sizes.head_dim, device=device)
    out = torch.empty(num_seqs, sizes.num_heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
    workspace = DecodeWorkspace.make(num_seqs, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, device)
    plan_units(lens, _BLOCK, workspace)
    scale = sizes.head_dim**-0.5
    strips = strips_of(pool)
    ours = [partial(decode_attention, qkv, norms, 1e-6, cos, cos, pool, strips, layer, tables, rows, lens, scale,
                    workspace, out) for layer in range(layers)]
    q = qkv[:, : sizes.num_heads, None].contiguous()
    runs = torch.randn(layers, 2, num_seqs, sizes.num_kv_heads, context, sizes.head_dim, device=device,
                       dtype=torch.bfloat16)
    theirs = [partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in runs]
    yield from moved(f"decode attention, B={num_seqs}, context {context}", num_bytes, ours, ceilings, "torch SDPA",
                     theirs)


def extend(sizes: Sizes, num_tokens: int, ceilings: Ceilings, device: torch.device) -> Iterator[Figure]:
    """A prompt of `num_tokens` with nothing cached."""
    num_blocks = -(-num_tokens // _BLOCK)
    pool = torch.randn(
        num_blocks, 1, 2, sizes.num_kv_heads, _BLOCK, sizes.head_dim, device=device, dtype=torch.bfloat16)
    tables = torch.randperm(num_blocks, device=device).to(torch.int32)[None]
    q = torch.randn(num_tokens, sizes.num_heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    tiles = make_tiles([0], [0], [0], [num_tokens], sizes.num_heads // sizes.num_kv_heads).to(device)
    scale = sizes.head_dim**-0.5
    ours = [partial(extend_attention, q, pool, strips_of(pool), 0, tables, tiles, scale, out)] * 4
    heads = q.transpose(0, 1)[None].contiguous()
    kv = torch.randn(2, 1, sizes.num_kv_heads, num_tokens, sizes.head_dim, device=device, dtype=torch.bfloat16)
    theirs = [partial(
        F.scaled_dot_product_attention, heads, kv[0], kv[1], is_causal=True, enable_gqa=True)] * 4
    num_flops = 2 * 2 * sizes.num_heads * sizes.head_dim * num_tokens * (num_tokens + 1) / 2
    yield from computed(f"extend attention, {num_tokens} tokens", num_flops, ours, ceilings, "torch SDPA", theirs)
