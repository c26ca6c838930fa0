from __future__ import annotations

import pytest

from engine.ragged_batch import build_batch
from engine.step import StepPlan
from tests.factories import planned_row


def test_rows_become_flat_arrays_with_their_own_positions_and_slots() -> None:
    plan = StepPlan(1, [
        planned_row([11, 12, 13], [7, 2], start=2, samples=False),
        planned_row([21], [5], start=0),
        planned_row([31], [1, 9, 4], start=8),
    ])
    batch = build_batch(plan, block_size=4)
    assert batch.token_ids.tolist() == [31, 21, 11, 12, 13]  # single tokens first, the longest context before
    assert batch.positions.tolist() == [8, 0, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [16, 20, 30, 31, 8]
    lengths = [(row.first, row.q_len, row.context_len, row.start) for row in batch.rows]
    assert lengths == [(0, 1, 9, 8), (1, 1, 1, 0), (2, 3, 5, 2)]
    assert list(batch.sampled) == [(2, 0), (1, 1)]


def test_a_row_reads_no_more_blocks_than_its_context_fills() -> None:
    batch = build_batch(StepPlan(1, [planned_row([1], [3, 6, 8, 9], start=4)]), block_size=4)
    assert batch.rows[0].blocks.tolist() == [3, 6]


def test_a_block_table_that_is_too_short_is_an_error() -> None:
    with pytest.raises(IndexError):
        build_batch(StepPlan(1, [planned_row([1, 2, 3], [3], start=3)]), block_size=4)
