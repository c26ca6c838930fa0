"""Attention of new tokens over cached prefix and themselves, paged: what prefill and chunks need.

A tile is some tokens of one sequence times the query heads of one KV head, so that short extends fill a tile too. A
tile walks the blocks up to its last position: those that all its tokens see, then, masked, those on the diagonal.
FlashAttention-2 (Dao 2023) over a block table.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

TILE_ROWS = 128


def reference(
    q: torch.Tensor, layer_cache: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, q_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`q` [num_tokens, num_heads, head_dim]: sequence after sequence, `q_lens` tokens from position `starts` each.

    Their KV is in the cache already. Returns [num_tokens, num_heads, head_dim] float32.
    """
    num_kv_heads, out, first = layer_cache.shape[2], [], 0
    for i, (start, length) in enumerate(zip(starts.tolist(), q_lens.tolist(), strict=True)):
        end = start + length
        blocks = layer_cache[tables[i, : -(-end // layer_cache.shape[3])].long()].float()
        kv = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end]  # [2, num_kv_heads, end, head_dim]
        heads = q[first : first + length].float().transpose(0, 1)
        k, v = (x.repeat_interleave(heads.shape[0] // num_kv_heads, 0) for x in kv)
        seen = torch.arange(end, device=q.device)[None, :] <= torch.arange(start, end, device=q.device)[:, None]
        scores = (heads @ k.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
        out.append((torch.softmax(scores, -1) @ v).transpose(0, 1))
        first += length
    return torch.cat(out)


@triton.jit
def _kernel(
    q_ptr,  # [num_tokens, q_stride / HEAD_DIM, HEAD_DIM]: query heads first
    strips,  # descriptor of the whole pool as [num_strips * BLOCK, HEAD_DIM], a strip at a time
    tables_ptr,  # [num_rows, table_stride] int32
    tiles_ptr,  # [num_tiles, 4] int32: row of `tables`, first flat token, first position, tokens
    out_ptr,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    q_stride, table_stride, num_kv_heads, first_strip, strips_per_block, scale_log2,
    GROUP: tl.constexpr, SPAN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr,
):
    PRECISION: tl.constexpr = "ieee" if WIDE else "tf32"
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    table = tables_ptr + tl.load(tiles_ptr + tile * 4).to(tl.int64) * table_stride
    flat = tl.load(tiles_ptr + tile * 4 + 1)
    start = tl.load(tiles_ptr + tile * 4 + 2)
    num_tokens = tl.load(tiles_ptr + tile * 4 + 3)

    r, d, n = tl.arange(0, TOKENS * SPAN), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK)
    token, head = r // SPAN, kv_head * GROUP + r % SPAN
    inside = (token < num_tokens) & (r % SPAN < GROUP)
    q_at = (flat + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    position = start + token
    m_i = tl.full([TOKENS * SPAN], -1.0e30, tl.float32)
    l_i = tl.zeros([TOKENS * SPAN], tl.float32)
    acc = tl.zeros([TOKENS * SPAN, HEAD_DIM], tl.float32)
    num_whole = (start + 1) // BLOCK  # blocks that every token of the tile sees whole
    num_blocks = (start + num_tokens + BLOCK - 1) // BLOCK
    for index in range(0, num_whole):
        at = (tl.load(table + index) * strips_per_block + first_strip + kv_head) * BLOCK
        k, v = strips.load([at, 0]), strips.load([at + num_kv_heads * BLOCK, 0])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - m_new[:, None])
        fade = tl.exp2(m_i - m_new)
        l_i = l_i * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m_i = m_new
    for index in range(num_whole, num_blocks):
        at = (tl.load(table + index) * strips_per_block + first_strip + kv_head) * BLOCK
        k, v = strips.load([at, 0]), strips.load([at + num_kv_heads * BLOCK, 0])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where((index * BLOCK + n)[None, :] <= position[:, None], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        fade = tl.exp2(m_i - m_new)
        l_i = l_i * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        m_i = m_new
    out = acc / l_i[:, None]
    out_at = (flat + token).to(tl.int64) * (num_kv_heads * GROUP * HEAD_DIM) + head * HEAD_DIM
    tl.store(out_ptr + out_at[:, None] + d[None, :], out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def tile_tokens(group: int) -> int:
    """Tokens of a tile, where `group` query heads share a KV head."""
    return max(1, TILE_ROWS // _span(group))


def _span(group: int) -> int:
    """Rows of a tile for each token: a power of two, the rest of it unused."""
    return 1 << (group - 1).bit_length()


def make_tiles(rows: list[int], firsts: list[int], starts: list[int], q_lens: list[int], group: int) -> torch.Tensor:
    """[num_tiles, 4] int32 on the CPU, the longest context first: those programs run longest.

    Sequence i has `q_lens[i]` tokens, flat from `firsts[i]` on, at positions from `starts[i]` on.
    """
    size = tile_tokens(group)
    tiles = [(row, first + at, start + at, min(size, length - at))
             for row, first, start, length in zip(rows, firsts, starts, q_lens, strict=True)
             for at in range(0, length, size)]
    tiles.sort(key=lambda tile: -tile[2])
    return torch.tensor(tiles, dtype=torch.int32)


def extend_attention(
    q: torch.Tensor, cache: torch.Tensor, strips: TensorDescriptor, layer: int, tables: torch.Tensor,
    tiles: torch.Tensor, scale: float, out: torch.Tensor,
) -> None:
    """`q` [num_tokens, any heads, head_dim], its query heads first; `out` [num_tokens, num_heads, head_dim].

    `strips` is of `cache` (see `block_strips`). Only tokens of `tiles` (see `make_tiles`) are written. A float32
    cache is multiplied in float32.
    """
    _, num_heads, head_dim = out.shape
    _, num_layers, _, num_kv_heads, block_size, _ = cache.shape
    group = num_heads // num_kv_heads
    assert q.stride(-1) == 1 and q.stride(1) == head_dim and out.is_contiguous() and block_size >= 16
    wide = cache.dtype == torch.float32
    _kernel[(num_kv_heads, len(tiles))](
        q, strips, tables, tiles, out, q.stride(0), tables.stride(0), num_kv_heads, layer * 2 * num_kv_heads,
        num_layers * 2 * num_kv_heads, scale * 1.4426950408889634, GROUP=group, SPAN=_span(group),
        TOKENS=tile_tokens(group), BLOCK=block_size, HEAD_DIM=head_dim, WIDE=wide, num_warps=8 if wide else 4,
        num_stages=1 if wide else 3)
