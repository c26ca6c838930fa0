"""A step's rows laid end to end: what the forward pass reads, in flat arrays. Torch-free.

Rows are put in an order that suits attention: single tokens first, longest context first, then chunks. `sampled` and
`scored` name the plan's rows by index, so nothing outside sees that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.step import PlannedRow, StepPlan

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Tokens `first .. first + q_len - 1` of the flat batch: the last `q_len` of `context_len` positions."""

    first: int
    q_len: int
    context_len: int
    blocks: Int64s  # [ceil(context_len / block_size)] int64

    @property
    def start(self) -> int:
        return self.context_len - self.q_len


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Arrays are [num_tokens] int64.

    `sampled`: (index in the plan, flat index of the row's last token) of the rows that sample. `scored`: (index in
    the plan, flat index of the row's first token) of the rows that score their prompt.
    """

    token_ids: Int64s
    positions: Int64s
    slot_mapping: Int64s
    rows: Sequence[BatchRow]
    sampled: Sequence[tuple[int, int]]
    scored: Sequence[tuple[int, int]]


def build_batch(plan: StepPlan, block_size: int) -> RaggedBatch:
    """Flatten a plan of at least one row. A block table too short for its row raises `IndexError`."""
    order = sorted(range(len(plan.rows)), key=lambda i: _shape_key(plan.rows[i]))
    rows: list[BatchRow] = []
    sampled: list[tuple[int, int]] = []
    scored: list[tuple[int, int]] = []
    positions: list[Int64s] = []
    slots: list[Int64s] = []
    first = 0
    for index in order:
        planned = plan.rows[index]
        q_len, context_len = len(planned.token_ids), planned.start + len(planned.token_ids)
        blocks = np.asarray(planned.block_ids[: -(-context_len // block_size)], dtype=np.int64)
        where = np.arange(planned.start, context_len, dtype=np.int64)
        positions.append(where)
        slots.append(blocks[where // block_size] * block_size + where % block_size)
        rows.append(BatchRow(first, q_len, context_len, blocks))
        if planned.scores_prompt:
            scored.append((index, first))
        first += q_len
        if planned.samples:
            sampled.append((index, first - 1))
    token_ids = np.fromiter((t for i in order for t in plan.rows[i].token_ids), dtype=np.int64, count=first)
    return RaggedBatch(token_ids, np.concatenate(positions), np.concatenate(slots), rows, sampled, scored)


def _shape_key(row: PlannedRow) -> tuple[bool, int]:
    return len(row.token_ids) > 1, -(row.start + len(row.token_ids))
