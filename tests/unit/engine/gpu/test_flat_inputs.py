"""The words that a step with chunks sends to the device."""

from __future__ import annotations

import numpy as np

from common.sampling_params import SamplingParams
from engine.gpu.flat_inputs import FlatLayout, FlatPlan, sampled_rows
from engine.step import UNKNOWN_TOKEN, PlannedRow

PARAMS = SamplingParams(max_tokens=4)
CHUNKS = (
    PlannedRow("a", [11, 12, 13], 62, (5, 9), True, 0, PARAMS),
    PlannedRow("b", [21, 22], 0, (7,), False, 0, PARAMS),
    PlannedRow("c", [UNKNOWN_TOKEN], 3, (2,), True, 1, PARAMS))
PLAN = FlatPlan(np.array([40, 41], np.int32), CHUNKS, [30, 31, 32], block_size=64, group=4)


def filled(layout: FlatLayout) -> object:
    words = np.full(layout.num_words, 77, np.int32)  # what an earlier step has left
    parts = layout.split(words)
    PLAN.fill(parts, PLAN.tiles())
    return parts


def test_decode_rows_come_first_then_the_chunks_one_after_the_other() -> None:
    parts = filled(FlatLayout(8, 5, 3))
    assert parts.codes.tolist() == [-41, -42, 11, 12, 13, 21, 22, -33]  # type: ignore[attr-defined]
    assert parts.positions[2:].tolist() == [62, 63, 64, 0, 1, 3]  # type: ignore[attr-defined]
    assert parts.slots.tolist() == [  # type: ignore[attr-defined]
        -1, -1, 5 * 64 + 62, 5 * 64 + 63, 9 * 64, 7 * 64, 7 * 64 + 1, 2 * 64 + 3]


def test_rows_that_draw_name_the_token_whose_logits_they_draw_from() -> None:
    parts = filled(FlatLayout(8, 5, 3))
    assert parts.drawing.tolist() == [40, 41, 30, 32, -1]  # type: ignore[attr-defined]
    assert parts.selected.tolist() == [0, 1, 4, 7, 0]  # type: ignore[attr-defined]
    assert sampled_rows(2, CHUNKS) == [0, 1, 2, 4]


def test_padding_writes_nothing_draws_nothing_and_attends_to_nothing() -> None:
    layout = FlatLayout.padded(64, 16, 4)
    parts = filled(layout)
    assert set(parts.codes[8:].tolist()) == {0}  # type: ignore[attr-defined]
    assert set(parts.slots[8:].tolist()) == {-1}  # type: ignore[attr-defined]
    assert set(parts.decode_rows[2:].tolist()) == set(parts.drawing[4:].tolist()) == {-1}  # type: ignore[attr-defined]
    tiles = parts.tiles.reshape(-1, 4)  # type: ignore[attr-defined]
    assert tiles[:3, 0].tolist() == [30, 32, 31]  # the longest context first
    assert tiles[:3, 3].tolist() == [3, 1, 2]
    assert not tiles[3:].any()


def test_every_part_is_aligned_alike_whatever_the_sizes_are() -> None:
    for sizes in ((1, 1, 1), (5, 3, 2), (64, 16, 18)):
        layout = FlatLayout(*sizes)
        words = np.arange(layout.num_words, dtype=np.int32)
        parts = layout.split(words)
        firsts = [getattr(parts, name)[0] for name in parts.__slots__]
        assert not any(first % 4 for first in firsts)
        assert [len(getattr(parts, name)) for name in parts.__slots__] == [
            *[sizes[0]] * 3, *[sizes[1]] * 3, 4 * sizes[2]]


def test_a_padded_layout_has_room_for_the_tiles_of_any_plan_of_its_size() -> None:
    chunks = [PlannedRow(str(i), [1] * length, 0, (0, 1, 2, 3), True, 0, PARAMS)
              for i, length in enumerate((33, 33, 33, 33, 1, 1))]
    plan = FlatPlan(np.empty(0, np.int32), chunks, range(6), block_size=64, group=4)
    assert len(plan.tiles()) <= FlatLayout.padded(plan.num_tokens, plan.num_rows, 4).num_tiles
