"""Attention of one new token per sequence over its paged KV: split over the context, packed over a KV head's queries.

A step's contexts are cut into units of equally many blocks, so that long and short sequences keep all processors busy
alike (`plan_units`, once a step); every layer runs one program for each (unit, KV head), and the last of a sequence's
units to arrive merges them. Flash-decoding (Dao et al. 2023) with a work list. Q and K are normed and turned here, and
the new token's K and V written, so that a decode step has no kernel for that.

Full blocks come by the copy engine and need no mask. A sequence's last block, into which the same program has just
written, comes by ordinary loads: the copy engine would not be bound to see that write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MIN_ROWS = 16  # of a tile that the matrix units take


def reference(
    q: torch.Tensor, layer_cache: torch.Tensor, tables: torch.Tensor, context_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """`q` [num_seqs, num_heads, head_dim], `tables` [num_seqs, max_blocks] → the same shape as `q`, in float32."""
    num_kv_heads = layer_cache.shape[2]
    out = torch.zeros_like(q, dtype=torch.float32)
    for i, length in enumerate(context_lens.tolist()):
        blocks = layer_cache[tables[i, : -(-length // layer_cache.shape[3])].long()].float()
        kv = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [2, num_kv_heads, length, head_dim]
        grouped = q[i].float().view(num_kv_heads, -1, q.shape[-1])
        weights = torch.softmax(grouped @ kv[0].transpose(-1, -2) * scale, -1)
        out[i] = (weights @ kv[1]).flatten(0, 1)
    return out


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Ways to run the same attention; as measured in whole steps of an H200 from 1 to 256 sequences."""

    num_warps: int = 4
    num_stages: int = 2
    units_per_seq: float = 1.0  # that a step is cut into, about, above 64 in all

    def target_units(self, num_seqs: int) -> int:
        return max(target_units(num_seqs), int(num_seqs * self.units_per_seq))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers for at most `max_seqs` sequences and `max_units` units; `first_units[i]` is sequence i's first unit."""

    choice: DecodeChoice
    max_seqs: int
    max_units: int
    first_units: torch.Tensor  # [max_seqs + 1] int32
    blocks_per_unit: torch.Tensor  # [1] int32
    partial: torch.Tensor  # [max_units, num_heads, head_dim] float32
    lse: torch.Tensor  # [max_units, num_heads] float32, base 2
    arrived: torch.Tensor  # [max_seqs, num_kv_heads] int32: units that are done; zero between launches

    @staticmethod
    def make(
        max_seqs: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device,
        choice: DecodeChoice = DecodeChoice(),
    ) -> DecodeWorkspace:
        max_units = max_seqs + choice.target_units(max_seqs)
        return DecodeWorkspace(
            choice, max_seqs, max_units, torch.zeros(max_seqs + 1, dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device),
            torch.zeros(max_units, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.zeros(max_units, num_heads, dtype=torch.float32, device=device),
            torch.zeros(max_seqs, num_kv_heads, dtype=torch.int32, device=device))


def target_units(num_seqs: int) -> int:
    """Into how many units a step's blocks are cut, about: enough for every processor, few enough to merge."""
    return max(64, num_seqs)


@triton.jit
def _plan_kernel(
    lens_ptr,  # [num_seqs] int32
    first_units_ptr,  # [num_seqs + 1] int32
    blocks_per_unit_ptr,  # [1] int32
    num_seqs, block_size, target, SEQS: tl.constexpr,
):
    i = tl.arange(0, SEQS)
    lens = tl.load(lens_ptr + i, mask=i < num_seqs, other=0)
    blocks = (lens + block_size - 1) // block_size
    per_unit = tl.maximum((tl.sum(blocks, 0) + target - 1) // target, 1)
    units = (blocks + per_unit - 1) // per_unit
    ends = tl.cumsum(units, 0)
    tl.store(blocks_per_unit_ptr, per_unit)
    tl.store(first_units_ptr + i, ends - units, mask=i < num_seqs)
    tl.store(first_units_ptr + num_seqs, tl.sum(units, 0))


@triton.jit
def _turned(
    heads_ptr, norms_ptr, cos, sin, d, live, eps, HAS_NORMS: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """Head norm and rotary position of heads at `heads_ptr` [ROWS, 1] pointers → [ROWS, HEAD_DIM] in their dtype."""
    other = (d + HEAD_DIM // 2) % HEAD_DIM
    x = tl.load(heads_ptr + d[None, :], mask=live, other=0.0)
    dtype = x.dtype
    a, b = x.to(tl.float32), tl.load(heads_ptr + other[None, :], mask=live, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(a * a, 1) / HEAD_DIM + eps)[:, None]
        a = a * scale * tl.load(norms_ptr + d[None, :], mask=live, other=0.0).to(tl.float32)
        b = b * scale * tl.load(norms_ptr + other[None, :], mask=live, other=0.0).to(tl.float32)
    return (a * cos[None, :] + b * sin[None, :]).to(dtype)


@triton.jit
def _attention_kernel(
    qkv_ptr,  # [num_seqs, num_heads + 2 * num_kv_heads, HEAD_DIM] of the new tokens, as the matrix product left it
    norms_ptr,  # [num_heads + num_kv_heads, HEAD_DIM]
    cos_ptr, sin_ptr,  # [max_len, HEAD_DIM] float32
    strips,  # descriptor of the whole pool as [num_strips * BLOCK, HEAD_DIM], a strip at a time
    cache_ptr,  # one layer of the pool: [num_blocks, 2, num_kv_heads, BLOCK, HEAD_DIM], blocks `block_stride` apart
    tables_ptr,  # [num_rows, table_stride] int32
    rows_ptr,  # [num_seqs] int32: sequence i's row of `tables`
    lens_ptr,  # [num_seqs] int32, the new token included; 0: padding
    first_units_ptr,  # [num_seqs + 1] int32
    blocks_per_unit_ptr,  # [1] int32
    partial_ptr,  # [max_units, num_heads, HEAD_DIM] float32
    lse_ptr,  # [max_units, num_heads] float32, base 2
    arrived_ptr,  # [max_seqs, num_kv_heads] int32, zero between launches
    out_ptr,  # [num_seqs, num_heads, HEAD_DIM]
    num_seqs, block_stride, table_stride, num_kv_heads, first_strip, strips_per_block, eps, scale_log2,
    SEQS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    HAS_NORMS: tl.constexpr, WIDE: tl.constexpr,
):
    PRECISION: tl.constexpr = "ieee" if WIDE else "tf32"
    kv_head, unit = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, SEQS)
    firsts = tl.load(first_units_ptr + 1 + i, mask=i < num_seqs, other=2147483647)
    seq = tl.sum((firsts <= unit).to(tl.int32), 0)
    if seq >= num_seqs:
        return
    length = tl.load(lens_ptr + seq)
    per_unit = tl.load(blocks_per_unit_ptr)
    first_unit = tl.load(first_units_ptr + seq)
    num_units = tl.load(first_units_ptr + seq + 1) - first_unit
    first = (unit - first_unit) * per_unit
    num_blocks = (length + BLOCK - 1) // BLOCK
    last = tl.minimum(first + per_unit, num_blocks)
    table = tables_ptr + tl.load(rows_ptr + seq).to(tl.int64) * table_stride
    num_heads = num_kv_heads * GROUP

    g, d, n = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + (length - 1) * HEAD_DIM + d)
    sin = tl.load(sin_ptr + (length - 1) * HEAD_DIM + d)
    qkv = qkv_ptr + seq.to(tl.int64) * (num_heads + 2 * num_kv_heads) * HEAD_DIM
    q_head = (kv_head * GROUP + g)[:, None]
    live = (g < GROUP)[:, None]
    q = _turned(qkv + q_head * HEAD_DIM, norms_ptr + q_head * HEAD_DIM, cos, sin, d, live, eps, HAS_NORMS, HEAD_DIM)
    strip = n[:, None] * HEAD_DIM + d[None, :]
    v_offset = num_kv_heads * BLOCK * HEAD_DIM

    m_i = tl.full([ROWS], -1.0e30, tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    has_newest = last == num_blocks
    num_whole = tl.where(has_newest, last - 1, last)
    for index in range(first, num_whole):
        at = (tl.load(table + index) * strips_per_block + first_strip + kv_head) * BLOCK
        k, v = strips.load([at, 0]), strips.load([at + num_kv_heads * BLOCK, 0])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        fade = tl.exp2(m_i - m_new)
        l_i = l_i * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m_i = m_new
    if has_newest:  # this program alone reads the new token's slot, so it writes it
        base = cache_ptr + tl.load(table + num_blocks - 1).to(tl.int64) * block_stride + kv_head * BLOCK * HEAD_DIM
        slot = base + (length - 1) % BLOCK * HEAD_DIM
        one = tl.arange(0, 1)[:, None]
        k_head = num_heads + kv_head + one
        k_new = _turned(
            qkv + k_head * HEAD_DIM, norms_ptr + k_head * HEAD_DIM, cos, sin, d, one == 0, eps, HAS_NORMS, HEAD_DIM)
        v_new = tl.load(qkv + (k_head + num_kv_heads) * HEAD_DIM + d[None, :])
        tl.store(slot + one * HEAD_DIM + d[None, :], k_new)
        tl.store(slot + v_offset + one * HEAD_DIM + d[None, :], v_new)
        tl.debug_barrier()
        k, v = tl.load(base + strip), tl.load(base + v_offset + strip)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(((num_blocks - 1) * BLOCK + n < length)[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        fade = tl.exp2(m_i - m_new)
        l_i = l_i * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m_i = m_new
    acc = acc / l_i[:, None]
    out_at = (seq.to(tl.int64) * num_heads + q_head) * HEAD_DIM + d[None, :]
    if num_units == 1:
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=live)
    else:
        heads = unit.to(tl.int64) * num_heads + q_head
        tl.store(partial_ptr + heads * HEAD_DIM + d[None, :], acc, mask=live)
        tl.store(lse_ptr + unit.to(tl.int64) * num_heads + kv_head * GROUP + g, m_i + tl.log2(l_i), mask=g < GROUP)
        tl.debug_barrier()
        arrived = arrived_ptr + seq * num_kv_heads + kv_head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == num_units - 1:  # the last to arrive merges
            tl.debug_barrier()
            m_i = tl.full([ROWS], -1.0e30, tl.float32)
            l_i = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
            for part in range(first_unit, first_unit + num_units):
                theirs = tl.cast(part, tl.int64) * num_heads + kv_head * GROUP + g
                lse = tl.load(lse_ptr + theirs, mask=g < GROUP, other=-1.0e30, cache_modifier=".cg")
                value = tl.load(partial_ptr + theirs[:, None] * HEAD_DIM + d[None, :], mask=live, other=0.0,
                                cache_modifier=".cg")
                m_new = tl.maximum(m_i, lse)
                fade, weight = tl.exp2(m_i - m_new), tl.exp2(lse - m_new)
                acc = acc * fade[:, None] + value * weight[:, None]
                l_i = l_i * fade + weight
                m_i = m_new
            tl.store(out_ptr + out_at, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=live)
            tl.store(arrived, 0)


def plan_units(context_lens: torch.Tensor, block_size: int, workspace: DecodeWorkspace) -> None:
    """Once a step, before the layers: cuts the contexts into units. A length of 0 is padding and gets none."""
    num_seqs = len(context_lens)
    assert num_seqs <= workspace.max_seqs and context_lens.dtype == torch.int32
    _plan_kernel[(1,)](
        context_lens, workspace.first_units, workspace.blocks_per_unit, num_seqs, block_size,
        workspace.choice.target_units(num_seqs), SEQS=max(16, triton.next_power_of_2(num_seqs)), num_warps=4)


def decode_attention(
    qkv: torch.Tensor, head_norms: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor,
    cache: torch.Tensor, strips: TensorDescriptor, layer: int, tables: torch.Tensor, rows: torch.Tensor,
    context_lens: torch.Tensor, scale: float, workspace: DecodeWorkspace, out: torch.Tensor,
) -> None:
    """Turns the new token's Q and K, writes its K and V to the slot of its position, and attends.

    `qkv` [num_seqs, num_heads + 2 * num_kv_heads, head_dim] contiguous, `head_norms` [num_heads + num_kv_heads,
    head_dim], `cos` and signed `sin` [max_len, head_dim] float32 (see `rope_write`), `cache` [num_blocks, num_layers,
    2, num_kv_heads, block_size, head_dim] with its `strips` (see `block_strips`), `out` [num_seqs, num_heads,
    head_dim]. `plan_units` has run for these `context_lens`. A float32 cache is multiplied in float32.
    """
    num_seqs, num_heads, head_dim = out.shape
    _, num_layers, _, num_kv_heads, block_size, _ = cache.shape
    layer_cache = cache[:, layer]
    group = num_heads // num_kv_heads
    assert qkv.is_contiguous() and out.is_contiguous() and block_size >= 16 and cos.dtype == torch.float32
    assert layer_cache.stride(1) == num_kv_heads * block_size * head_dim and tables.stride(1) == 1
    choice = workspace.choice
    max_units = choice.target_units(num_seqs) + num_seqs
    _attention_kernel[(num_kv_heads, max_units)](
        qkv, qkv if head_norms is None else head_norms, cos, sin, strips, layer_cache, tables, rows, context_lens,
        workspace.first_units, workspace.blocks_per_unit, workspace.partial, workspace.lse, workspace.arrived, out,
        num_seqs, layer_cache.stride(0), tables.stride(0), num_kv_heads, layer * 2 * num_kv_heads,
        num_layers * 2 * num_kv_heads, eps, scale * 1.4426950408889634,
        SEQS=max(16, triton.next_power_of_2(num_seqs)), GROUP=group,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)), BLOCK=block_size, HEAD_DIM=head_dim,
        HAS_NORMS=head_norms is not None, WIDE=layer_cache.dtype == torch.float32, num_warps=choice.num_warps,
        num_stages=choice.num_stages)
