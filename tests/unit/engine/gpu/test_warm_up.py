"""The plans that run before the first request."""

from __future__ import annotations

import pytest

from engine.gpu.warm_up import StepSizes, largest_step, warm_up
from engine.step import StepPlan, StepResult


class Noting:
    """A runner that keeps its plans, and who is still known."""

    vocab_size, eos_token_ids, block_bytes = 100, frozenset({0}), 1

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.known: set[str] = set()

    def block_view(self, block_id: int) -> memoryview:
        raise IndexError(block_id)

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.known |= {join.request_id for join in plan.joins}

    def collect(self) -> StepResult:
        return StepResult(1, [])

    def forget(self, request_id: str) -> None:
        self.known.remove(request_id)


@pytest.mark.parametrize("sizes", [
    StepSizes(256, 8192, 4096, 64), StepSizes(1, 1, 64, 64), StepSizes(5, 40, 64, 16), StepSizes(300, 512, 100, 64)])
def test_no_plan_is_beyond_what_the_engine_will_ever_run(sizes: StepSizes) -> None:
    runner = Noting()
    warm_up(runner, sizes)
    for plan in [*runner.plans, largest_step(sizes)]:
        assert 0 < plan.num_rows <= sizes.max_num_seqs
        assert plan.num_tokens <= sizes.max_num_batched_tokens
        for row in plan.rows:
            assert row.start + len(row.token_ids) <= min(sizes.max_len, len(row.block_ids) * sizes.block_size)
    assert not runner.known


def test_the_largest_step_uses_up_the_budget_and_draws_in_every_row() -> None:
    plan = largest_step(StepSizes(256, 8192, 4096, 64))
    assert (plan.num_tokens, plan.num_rows) == (8192, 256)
    assert all(row.samples for row in plan.rows)


def test_mixed_steps_go_through_every_power_of_two_and_the_number_before_it() -> None:
    runner = Noting()
    warm_up(runner, StepSizes(64, 8192, 4096, 64))
    mixed = {len(plan.decode) for plan in runner.plans if plan.num_tokens > 2048 and plan.chunks}
    assert {0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63} <= mixed
