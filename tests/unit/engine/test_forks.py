"""Requests with n > 1: the prompt is computed once, and what each choice draws depends on its index alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from common.errors import DeadlineExceeded, InvalidRequest
from engine.outputs import FinishReason, RequestOutput
from engine.request import sequence_id
from tests.unit.engine.builders import Engine, ask, oracle, prompt
from tests.unit.engine.fake_grammar import FakeGrammar


def check(engine: Engine, name: str, num_prompt: int, n: int, max_tokens: int = 8) -> None:
    for choice in range(n):
        assert engine.tokens[sequence_id(name, choice)] == oracle(prompt(num_prompt), max_tokens, choice)
        assert engine.last[sequence_id(name, choice)].choice == choice


@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 32, 33, 50])
@pytest.mark.parametrize("caching", [True, False])
def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared(num_prompt: int, caching: bool) -> None:
    engine = Engine(enable_prefix_caching=caching)
    engine.run(ask("r", prompt(num_prompt), n=3))
    check(engine, "r", num_prompt, 3)
    rows = [row for plan in engine.runner.plans for row in plan.chunks]
    assert sorted(len(row.token_ids) for row in rows) == sorted([num_prompt, 1, 1])
    copies = [copy for plan in engine.runner.plans for copy in plan.copies]
    assert len(copies) == (2 if (num_prompt - 1) % 16 else 0)
    forked = [row.block_ids for row in rows if "#" in row.request_id]
    first = next(row.block_ids for row in rows if row.request_id == "r")
    num_full = (num_prompt - 1) // 16
    assert all(table[:num_full] == first[:num_full] for table in forked)
    assert not set(forked[0][num_full:]) & set(forked[1][num_full:])
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks


@pytest.mark.parametrize("fields", [
    {"max_num_seqs": 2}, {"max_num_seqs": 1}, {"num_blocks": 5}, {"num_blocks": 5, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 3, "max_num_seqs": 2}])
def test_more_choices_than_can_run_take_turns(fields: dict[str, Any]) -> None:
    engine = Engine(poisons=True, **fields)
    engine.run(ask("r", prompt(40), n=6, max_tokens=20))
    check(engine, "r", 40, 6, 20)
    assert engine.core.stats().num_prompt_tokens == 40


def test_a_fork_gives_its_blocks_up_before_anything_is_preempted() -> None:
    engine = Engine(num_blocks=6, max_num_seqs=2)
    engine.add(ask("other", prompt(10, first=7), max_tokens=40))
    engine.step()
    engine.run(ask("r", prompt(40), n=3, max_tokens=8))
    check(engine, "r", 40, 3)
    assert engine.tokens["other"] == oracle(prompt(10, first=7), 40)


def test_a_choice_that_was_preempted_goes_on_with_its_own_tokens() -> None:
    engine = Engine(num_blocks=9)
    engine.run(ask("r", prompt(34), n=3, max_tokens=40))
    assert engine.core.stats().num_preemptions > 0
    check(engine, "r", 34, 3, 40)


def test_an_abort_ends_all_choices_each_with_one_output() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(ask("r", prompt(40), n=4, max_tokens=50))
    for _ in range(4):
        engine.step()
    output = engine.core.abort("r")
    assert output is not None
    engine.record(output)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.core.add(ask("r", prompt(4)))
    assert "r" not in engine.core
    engine.run()
    assert [engine.last[sequence_id("r", i)].finish_reason for i in range(4)] == [FinishReason.ABORT] * 4
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks


def test_a_failure_ends_all_choices_with_one_output() -> None:
    now = 0.0
    engine = Engine(max_num_seqs=2, clock=lambda: now)
    engine.add(ask("r", prompt(40), n=4, max_tokens=50, deadline=5.0))
    for _ in range(4):
        engine.step()
    now = 6.0
    (output,) = [output for output in engine.step() if output.finish_reason is not None]
    assert isinstance(output.error, DeadlineExceeded)
    engine.run()
    assert not list(engine.core._roster.live())
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks


def test_choices_of_a_reserved_request_begin_once_its_kv_is_there() -> None:
    engine = Engine()
    asked = ask("r", prompt(50), n=3)
    reservation = engine.core.reserve(asked)
    engine.expect(asked)
    assert not engine.core.has_work
    engine.write(reservation.block_ids, prompt(50)[:49])
    engine.core.land("r", 49)
    engine.core.start("r")
    engine.run()
    check(engine, "r", 50, 3)
    assert sum(plan.num_tokens for plan in engine.runner.plans) == 3 * 8


def test_each_choice_has_a_grammar_state_of_its_own() -> None:
    engine = Engine()
    grammar = FakeGrammar(seed=5, length=12)
    engine.add(ask("r", prompt(20), n=3, max_tokens=40), grammar.fork())
    engine.run()
    for choice in range(3):
        name = sequence_id("r", choice)
        assert engine.tokens[name] == oracle(prompt(20), 40, choice, grammar)
        assert engine.last[name].finish_reason is FinishReason.STOP


def test_one_choice_resumes_alone_and_several_cannot() -> None:
    engine = Engine()
    drawn = oracle(prompt(20), 3, choice=2)
    engine.run(ask("r", prompt(20), choice=2, output_token_ids=drawn))
    assert engine.tokens["r"] == oracle(prompt(20), 8, choice=2)
    assert engine.last["r"].choice == 2
    for fields in ({"choice": 1}, {"output_token_ids": drawn}):
        with pytest.raises(InvalidRequest, match="n: one choice alone") as caught:
            engine.core.add(ask("s", prompt(20), n=2, **fields))
        assert caught.value.param == "n"


def test_no_deadline_takes_the_blocks_of_a_request_with_choices_that_others_fill() -> None:
    now = 0.0
    engine = Engine(clock=lambda: now)
    asked = ask("r", prompt(50), n=3, deadline=5.0)
    engine.core.reserve(asked)
    engine.expect(asked)
    engine.add(ask("early", prompt(4), max_tokens=99, deadline=1.0))
    engine.add(ask("other", prompt(4, first=4), max_tokens=99))
    for seconds in (0.0, 2.0, 6.0):
        now = seconds
        engine.step()
    assert list(engine.last) == ["early"]
    assert len(engine.core.block_ids("r")) == 4
    engine.core.start("r")
    engine.step()
    assert isinstance(engine.last["r"].error, DeadlineExceeded)


@pytest.mark.parametrize("num_fail", [1, 2, 3])
@pytest.mark.parametrize("enable_overlap", [True, False])
def test_choices_whose_grammar_fails_in_one_step_end_with_one_output_and_nothing_after_it(
    num_fail: int, enable_overlap: bool
) -> None:
    class Counted(FakeGrammar):
        num_forks = 0

        def fork(self) -> FakeGrammar:
            Counted.num_forks += 1
            return Free(10**6 if Counted.num_forks >= num_fail else 3)

    class Free(Counted):
        def __init__(self, max_accepted: int) -> None:
            super().__init__(1, 10**6, max_accepted=max_accepted)

        def forced(self) -> tuple[int, ...]:
            return ()

        def _allowed(self, accepted: Sequence[int]) -> list[int]:
            return list(range(3, 50))

    engine = Engine(enable_overlap=enable_overlap)
    engine.add(ask("other", prompt(20, first=5), max_tokens=30))
    engine.add(ask("r", prompt(20), max_tokens=30, n=3), Free(3))
    outputs: list[RequestOutput] = []
    while engine.core.has_work:
        outputs += [output for output in engine.step() if output.request_id == "r"]
    assert [isinstance(output.error, InvalidRequest) for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].num_output_tokens == 3
    assert engine.tokens["other"] == oracle(prompt(20, first=5), 30)
    assert engine.core.stats().num_free_blocks == engine.config.num_blocks


def test_all_choices_are_answered_where_the_grammar_allows_nothing_but_the_end() -> None:
    engine = Engine()
    engine.add(ask("r", prompt(20), n=3), FakeGrammar(1, length=0))
    engine.run()
    assert [engine.last[sequence_id("r", i)].finish_reason for i in range(3)] == [FinishReason.STOP] * 3
    assert engine.runner.plans == []


def test_a_choice_waits_until_the_runner_has_forgotten_an_earlier_one_of_its_name() -> None:
    engine = Engine()
    first = oracle(prompt(20), 30)
    stop = next(token_id for token_id in first[2:] if token_id not in oracle(prompt(20), 20, 1))
    engine.add(ask("r", prompt(20), 30, n=2, stop_token_ids=(stop,)))
    while "r" not in engine.last:
        engine.step()
    for _ in range(2):
        engine.step()
    engine.core.release("r")  # the second choice alone is in flight
    assert engine.core._roster.in_flight.num_leaving == 1
    engine.last.clear()
    again = ask("r", prompt(40, first=9), n=2)
    reservation = engine.core.reserve(again)
    engine.expect(again)
    engine.write(reservation.block_ids, prompt(40, first=9)[:39])
    engine.core.land("r", 39)
    engine.core.start("r")
    engine.run()
    for choice in range(2):
        assert engine.tokens[sequence_id("r", choice)] == oracle(prompt(40, first=9), 8, choice)
