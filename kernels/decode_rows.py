"""The state of running sequences on the device, one row each, and what a decode step reads from it and writes back.

`gather` makes a step's flat inputs from the rows that decode; `advance` puts the drawn tokens back. So a captured
step needs nothing from the host but the list of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _gather_kernel(
    rows_ptr,  # [num_seqs] int32; -1: padding
    last_tokens_ptr, num_computed_ptr,  # [num_rows] int32
    tables_ptr,  # [num_rows, table_stride] int32
    tokens_ptr,  # [num_seqs] int64
    positions_ptr, lens_ptr,  # [num_seqs] int32
    slots_ptr,  # [num_seqs] int64
    num_seqs, table_stride, block_size, SEQS: tl.constexpr,
):
    i = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    inside = i < num_seqs
    row = tl.load(rows_ptr + i, mask=inside, other=-1)
    live = inside & (row >= 0)
    position = tl.load(num_computed_ptr + row, mask=live, other=0)
    block = tl.load(tables_ptr + row.to(tl.int64) * table_stride + position // block_size, mask=live, other=0)
    slot = block.to(tl.int64) * block_size + position % block_size
    token = tl.load(last_tokens_ptr + row, mask=live, other=0)
    tl.store(tokens_ptr + i, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + i, position, mask=inside)
    tl.store(lens_ptr + i, tl.where(live, position + 1, 0), mask=inside)
    tl.store(slots_ptr + i, tl.where(live, slot, -1), mask=inside)


@triton.jit
def _advance_kernel(
    rows_ptr,  # [num_seqs] int32
    drawn_ptr,  # [num_seqs] int64
    last_tokens_ptr, num_computed_ptr, output_positions_ptr,  # [num_rows] int32
    num_seqs, by, SEQS: tl.constexpr,
):
    i = tl.program_id(0) * SEQS + tl.arange(0, SEQS)
    row = tl.load(rows_ptr + i, mask=i < num_seqs, other=-1)
    live = (i < num_seqs) & (row >= 0)
    drawn = tl.load(drawn_ptr + i, mask=live, other=0)
    tl.store(last_tokens_ptr + row, tl.maximum(drawn, 0).to(tl.int32), mask=live)
    computed = tl.load(num_computed_ptr + row, mask=live, other=0)
    tl.store(num_computed_ptr + row, computed + by, mask=live)
    position = tl.load(output_positions_ptr + row, mask=live, other=0)
    tl.store(output_positions_ptr + row, position + by, mask=live)


def gather(
    rows: torch.Tensor, last_tokens: torch.Tensor, num_computed: torch.Tensor, tables: torch.Tensor, block_size: int,
    tokens: torch.Tensor, positions: torch.Tensor, context_lens: torch.Tensor, slots: torch.Tensor,
) -> None:
    """Row i's next token is at position `num_computed`, its KV goes to that position's slot. Padding: slot -1."""
    num_seqs = len(rows)
    assert tokens.dtype == slots.dtype == torch.int64 and tables.dtype == torch.int32
    _gather_kernel[(triton.cdiv(num_seqs, 128),)](
        rows, last_tokens, num_computed, tables, tokens, positions, context_lens, slots, num_seqs, tables.stride(0),
        block_size, SEQS=128, num_warps=4)


def advance(
    rows: torch.Tensor, drawn: torch.Tensor, last_tokens: torch.Tensor, num_computed: torch.Tensor,
    output_positions: torch.Tensor, by: int = 1,
) -> None:
    """One token of each row is computed and `drawn` [num_seqs] came of it. `by` 0: only another one was drawn."""
    num_seqs = len(rows)
    _advance_kernel[(triton.cdiv(num_seqs, 128),)](
        rows, drawn, last_tokens, num_computed, output_positions, num_seqs, by, SEQS=128, num_warps=4)
