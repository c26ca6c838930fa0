from __future__ import annotations

import pytest

from common.sampling_params import SamplingParams
from engine.step import DecodeRows, PlannedRow, StepPlan, StepResult

PARAMS = SamplingParams(max_tokens=8)
DECODE = DecodeRows(["a", "b"], [7, 8], [4, 5], [(0, 1), (2, 3)], [1, 2], [PARAMS, PARAMS])
CHUNK = PlannedRow("c", [9, 9, 9], 0, (4,), False, 0, PARAMS)


def test_rows_are_those_of_the_columns_and_then_the_chunks() -> None:
    plan = StepPlan(1, [CHUNK], DECODE)
    assert plan.rows == [
        PlannedRow("a", (7,), 4, (0, 1), True, 1, PARAMS), PlannedRow("b", (8,), 5, (2, 3), True, 2, PARAMS), CHUNK]
    assert (plan.num_rows, plan.num_tokens) == (3, 5)
    assert (StepPlan(2, []).num_rows, StepPlan(2, []).rows) == (0, [])


@pytest.mark.parametrize(
    ("token_ids", "message"), [
        ([1, 2], "with 2 rows, expected step 1 with 3"),
        ([1, None, None], "request b: samples is True, but token None was drawn"),
        ([1, 2, 3], "request c: samples is False, but token 3 was drawn"),
    ])
def test_a_result_must_have_a_token_for_exactly_the_rows_that_sample(token_ids: list[int | None], message: str) -> None:
    plan = StepPlan(1, [CHUNK], DECODE)
    plan.check(StepResult(1, [1, 2, None]))
    with pytest.raises(ValueError, match=message):
        plan.check(StepResult(1, token_ids))
