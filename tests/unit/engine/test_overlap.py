"""A step is planned while the one before runs: same tokens, and nothing is given back too early."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import DeadlineExceeded
from engine.mock_runner import MockMode
from engine.outputs import FinishReason, RequestOutput
from engine.step import UNKNOWN_TOKEN
from tests.unit.engine.builders import Engine, ask, oracle, prompt


def test_a_running_sequence_is_planned_before_its_newest_token_is_known() -> None:
    engine = Engine()
    engine.add(ask("r", prompt(20), max_tokens=5))
    assert [len(engine.step()) for _ in range(6)] == [0, 1, 1, 1, 1, 1]
    assert [list(plan.decode.token_ids) for plan in engine.runner.plans] == [[]] + [[UNKNOWN_TOKEN]] * 4
    assert [list(plan.decode.starts) for plan in engine.runner.plans[1:]] == [[20], [21], [22], [23]]
    assert engine.tokens["r"] == oracle(prompt(20), 5)
    assert not engine.core.has_work


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 12, "block_size": 4}, {"max_num_batched_tokens": 7}])
def test_tokens_and_counts_are_the_same_with_overlap_off(sizes: dict[str, Any]) -> None:
    def run(enable_overlap: bool) -> tuple[dict[str, list[int]], dict[str, RequestOutput]]:
        engine = Engine(max_num_seqs=6, enable_overlap=enable_overlap, **{"max_num_batched_tokens": 32, **sizes})
        requests = [ask(f"r{i}", prompt(5 + i, first=i), max_tokens=4 + i % 5, n=1 + i % 3) for i in range(12)]
        last = engine.run(*requests)
        assert engine.core.stats().num_generated_tokens == sum(map(len, engine.tokens.values()))
        return engine.tokens, {
            name: output._replace(num_cached_tokens=0, num_computed_tokens=0, timing=None)
            for name, output in last.items()}

    assert run(True) == run(False)


def test_an_end_by_length_costs_no_row_and_a_stop_at_most_one() -> None:
    engine = Engine()
    engine.run(*(ask(f"r{i}", prompt(9, first=i), max_tokens=1 + i) for i in range(5)))
    assert engine.core.stats().num_wasted_rows == 0
    echo = Engine(MockMode.ECHO)
    echo.run(ask("r", [7, 8], max_tokens=9))
    assert (echo.tokens["r"], echo.core.stats().num_wasted_rows) == ([7, 8, 2], 1)
    assert echo.core.stats().num_generated_tokens == 3


@pytest.mark.parametrize("ends", ["abort", "release", "deadline"])
def test_one_that_ends_in_flight_is_answered_at_once_and_keeps_its_blocks_until_the_step_has_retired(ends: str) -> None:
    now = 0.0
    engine = Engine(num_blocks=16, clock=lambda: now)
    engine.add(ask("r", prompt(20), max_tokens=50, deadline=5.0))
    engine.add(ask("other", prompt(20, first=4), max_tokens=50))
    for _ in range(3):
        engine.step()
    if ends == "abort":
        output = engine.core.abort("r")
        assert output is not None
        assert output.finish_reason is FinishReason.ABORT
    elif ends == "release":
        engine.core.release("r")
    else:
        now = 6.0
        engine.step()
        assert isinstance(engine.last["r"].error, DeadlineExceeded)
    assert "r" not in engine.core
    if ends != "deadline":
        assert (engine.core.stats().num_free_blocks, engine.runner.forgotten) == (12, [])
        engine.core.check_integrity()
        engine.step()
    assert (engine.core.stats().num_free_blocks, engine.runner.forgotten) == (14, ["r"])
    assert engine.core.stats().num_leaked_blocks == 0


def test_an_id_that_is_used_again_at_once_waits_until_the_runner_has_forgotten_the_old_one() -> None:
    engine = Engine()
    engine.add(ask("r", prompt(20), max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.core.release("r")
    engine.tokens.clear()
    engine.run(ask("r", prompt(30, first=5), max_tokens=4))
    assert engine.tokens["r"] == oracle(prompt(30, first=5), 4)


def test_one_that_is_used_again_and_ends_at_once_lets_the_runner_keep_the_old_one_until_its_step_has_retired() -> None:
    engine = Engine()
    engine.add(ask("r", prompt(20), max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.core.release("r")
    engine.core.add(ask("r", prompt(30, first=5)))
    assert engine.core.abort("r") is not None
    assert engine.runner.forgotten == []
    engine.run()
    assert engine.runner.forgotten == ["r"]


def test_blocks_that_are_still_in_flight_are_waited_for_and_nothing_in_flight_is_preempted() -> None:
    engine = Engine(num_blocks=7)
    last = engine.run(*(ask(name, prompt(34, first=ord(name)), max_tokens=35) for name in "ab"))
    assert engine.core.stats().num_preemptions > 0
    assert all(output.num_output_tokens == 35 for output in last.values())
    for name in "ab":
        assert engine.tokens[name] == oracle(prompt(34, first=ord(name)), 35)


def test_every_sequence_joins_before_it_draws_and_again_after_it_was_forgotten() -> None:
    engine = Engine(num_blocks=7)
    engine.run(*(ask(name, prompt(34, first=ord(name)), max_tokens=35) for name in "ab"), ask(
        "p", prompt(20), prefill_only=True))
    engine.core.release("p")
    joins = [join for plan in engine.runner.plans for join in plan.joins]
    assert [join.request_id for join in joins][:2] == ["a", "b"]
    assert {join.request_id for join in joins} == {"a", "b"}
    again = [join for join in joins if join.request_id == "b"][1]
    assert again.num_prompt_tokens == 34
    assert list(again.token_ids) == [*prompt(34, first=ord("b")), *engine.tokens["b"][: len(again.token_ids) - 34]]


def test_a_failure_leaves_nothing_behind_a_step_in_flight() -> None:
    engine = Engine()
    engine.add(ask("r", prompt(20), max_tokens=50))
    for _ in range(3):
        engine.step()
    engine.core.close(DeadlineExceeded("over"))
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks
    assert not engine.core.has_work
    engine.core.check_integrity()
