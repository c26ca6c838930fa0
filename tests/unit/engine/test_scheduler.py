"""Scheduling, seen through a whole engine with a mock runner: what each step computes, and what ends a request."""

from copy import copy
from typing import Any

import pytest

from common.errors import DeadlineExceeded
from engine.core import EngineFailed
from engine.mock_runner import MockMode
from engine.outputs import FinishReason
from engine.step import PlannedRow, StepResult
from tests.unit.engine.builders import Engine, ask, oracle, prompt


def rows(engine: Engine) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each row of the last step."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in engine.runner.plans[-1].rows]


def test_a_long_prompt_is_chunked_within_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.run(ask("long", prompt(150), max_tokens=2))
    assert [[(row.start, len(row.token_ids), row.samples) for row in plan.rows] for plan in engine.runner.plans] == [
        [(0, 64, False)], [(64, 64, False)], [(128, 22, True)], [(150, 1, True)]]
    assert engine.tokens["long"] == oracle(prompt(150), 2)


def test_running_answers_get_their_token_before_any_chunk() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.core.add(ask("short", prompt(4), max_tokens=20))
    engine.step()
    engine.core.add(ask("long", prompt(300, first=4)))
    for step in range(4):
        engine.step()
        assert rows(engine) == [("short", 4 + step, 1), ("long", 63 * step, 63)]


def test_the_oldest_prompt_gets_half_and_the_shortest_remainders_the_rest() -> None:
    engine = Engine(max_num_batched_tokens=64)
    for index, size in enumerate((100, 40, 10)):
        engine.core.add(ask(f"r{index}", prompt(size, first=index)))
    engine.step()
    assert rows(engine) == [("r0", 0, 32), ("r1", 0, 22), ("r2", 0, 10)]
    engine.step()
    assert rows(engine) == [("r2", 10, 1), ("r0", 32, 45), ("r1", 22, 18)]
    engine.step()
    assert rows(engine) == [("r2", 11, 1), ("r1", 40, 1), ("r0", 77, 23)]


def test_a_long_prompt_holds_short_ones_back_by_no_step_and_goes_on_by_half_a_budget_beside_any_number() -> None:
    engine = Engine(max_num_batched_tokens=64, max_num_seqs=32)
    for name in ("long", "longer"):
        engine.core.add(ask(name, prompt(500, first=ord(name[-1]))))
    engine.step()
    for step in range(1, 8):
        for index in range(2):
            engine.core.add(ask(f"{step}.{index}", prompt(16, first=10 + step * 3 + index), max_tokens=1))
        engine.step()
        assert {f"{step}.0", f"{step}.1"} <= {name for name, _, _ in rows(engine)}
        assert [num for name, _, num in rows(engine) if name == "long"] == [32]
    assert engine.run()["long"].num_output_tokens == 8


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    engine = Engine(num_blocks=8)
    engine.core.add(ask("first", prompt(60), max_tokens=3))
    engine.step()
    engine.core.add(ask("big", prompt(100, first=4), max_tokens=3))
    engine.core.add(ask("small", prompt(4, first=5), max_tokens=3))
    engine.step()
    assert [request_id for request_id, _, _ in rows(engine)] == ["first"]
    engine.run()
    assert list(engine.last) == ["first", "big", "small"]


def test_no_more_than_max_num_seqs_run_and_all_are_served() -> None:
    engine = Engine(max_num_seqs=3, max_num_batched_tokens=48)
    last = engine.run(*(ask(f"r{i}", prompt(20, first=i), max_tokens=5) for i in range(10)))
    assert len(last) == 10
    assert max(len(plan.rows) for plan in engine.runner.plans) == 3


def test_a_prefix_hit_skips_all_but_what_must_be_computed() -> None:
    engine = Engine()
    engine.run(ask("a", prompt(48)))
    last = engine.run(ask("b", prompt(48)))
    assert last["b"].num_cached_tokens == 32
    assert last["a"].num_cached_tokens == 0
    assert engine.tokens["b"] == engine.tokens["a"]
    stats = engine.core.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.num_prompt_tokens) == (96, 32, 96)


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    engine = Engine()
    first = prompt(20)
    engine.run(ask("turn 1", first, max_tokens=30))
    second = first + engine.tokens["turn 1"] + prompt(10, first=9)
    last = engine.run(ask("turn 2", second))
    assert last["turn 2"].num_cached_tokens == 48  # 49 tokens of the first turn have KV: the last one was never run
    assert engine.tokens["turn 2"] == oracle(second, 8)


def test_salts_and_adapters_hit_only_their_own() -> None:
    engine = Engine()
    kinds: list[dict[str, Any]] = [{}, {"cache_salt": "A"}, {"cache_salt": "B"}, {"adapter": "A"}]
    for repeat, cached in ((0, 0), (1, 48)):
        for index, kind in enumerate(kinds):
            name = f"{index}.{repeat}"
            assert engine.run(ask(name, prompt(64), **kind))[name].num_cached_tokens == cached


@pytest.mark.parametrize(("num_blocks", "is_preempted"), [(7, True), (64, False)])
def test_preemption_neither_loses_nor_doubles_tokens(num_blocks: int, is_preempted: bool) -> None:
    engine = Engine(num_blocks=num_blocks)
    prompts = {"a": prompt(34), "b": prompt(34, first=4)}
    last = engine.run(*(ask(name, tokens, max_tokens=35) for name, tokens in prompts.items()))
    assert (engine.core.stats().num_preemptions > 0) is is_preempted
    for name, tokens in prompts.items():
        assert engine.tokens[name] == oracle(tokens, 35)
        assert (last[name].num_prompt_tokens, last[name].num_output_tokens) == (34, 35)
        assert last[name].finish_reason is FinishReason.LENGTH
    positions: dict[str, list[int]] = {"a": [], "b": []}
    for row in (row for plan in engine.runner.plans for row in plan.rows if row.samples):
        positions[row.request_id].append(row.output_position)
    assert positions == {"a": list(range(35)), "b": list(range(35))}


def test_the_latest_arrival_is_preempted_and_the_runner_told() -> None:
    engine = Engine(num_blocks=7)
    engine.core.add(ask("a", prompt(34), max_tokens=35))
    engine.core.add(ask("b", prompt(34, first=4), max_tokens=35))
    while not engine.core.stats().num_preemptions:
        engine.step()
    assert engine.runner.forgotten_before[-1] == ("b",)  # before the step that may grant its blocks anew
    assert [row.request_id for row in engine.runner.plans[-1].rows] == ["a"]
    engine.run()
    assert list(engine.last) == ["a", "b"]
    assert set(engine.runner.forgotten) == {"a", "b"}


def test_a_request_alone_ends_with_length_when_the_pool_ends() -> None:
    engine = Engine(num_blocks=8)
    last = engine.run(ask("r", prompt(100), max_tokens=100))
    assert last["r"].finish_reason is FinishReason.LENGTH
    assert last["r"].num_output_tokens == 28
    assert engine.tokens["r"] == oracle(prompt(100), 28)
    assert engine.core.stats().num_preemptions == 0


def test_the_pool_ends_an_answer_at_the_same_token_whoever_else_runs() -> None:
    engine = Engine(num_blocks=8)
    last = engine.run(*(ask(f"r{i}", prompt(40, first=i), max_tokens=500) for i in range(3)))
    assert [last[f"r{i}"].num_output_tokens for i in range(3)] == [88, 88, 88]
    assert engine.core.stats().num_preemptions < 10


def test_end_of_sequence_stops_and_is_in_the_output() -> None:
    engine = Engine(MockMode.ECHO)
    last = engine.run(ask("r", [7, 8], max_tokens=9))
    assert engine.tokens["r"] == [7, 8, 2]
    assert (last["r"].finish_reason, last["r"].stop_token_id) == (FinishReason.STOP, 2)


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    engine = Engine(MockMode.ECHO)
    last = engine.run(ask("r", [7, 8], max_tokens=4, ignore_eos=True))
    assert engine.tokens["r"] == [7, 8, 2, 2]
    assert (last["r"].finish_reason, last["r"].stop_token_id) == (FinishReason.LENGTH, None)


def test_a_stop_token_wins_over_max_tokens_and_over_ignore_eos() -> None:
    engine = Engine(MockMode.ECHO)
    last = engine.run(
        ask("stop", [7, 8], max_tokens=2, stop_token_ids=(8,)),
        ask("eos", [7], max_tokens=9, stop_token_ids=(2,), ignore_eos=True))
    assert (last["stop"].finish_reason, last["stop"].stop_token_id) == (FinishReason.STOP, 8)
    assert (last["eos"].finish_reason, last["eos"].stop_token_id) == (FinishReason.STOP, 2)


def test_the_context_ends_an_answer_with_length() -> None:
    engine = Engine(max_model_len=32)
    last = engine.run(ask("r", prompt(31), max_tokens=9), ask("s", prompt(30), max_tokens=9))
    assert (last["r"].num_output_tokens, last["s"].num_output_tokens) == (1, 2)
    assert last["r"].finish_reason is FinishReason.LENGTH


def test_a_passed_deadline_ends_running_and_waiting_requests_with_an_error() -> None:
    now = 0.0
    engine = Engine(max_num_seqs=1, clock=lambda: now)
    engine.core.add(ask("runs", prompt(20), max_tokens=99, deadline=5.0))
    engine.core.add(ask("waits", prompt(20), max_tokens=99, deadline=5.0))
    engine.core.add(ask("patient", prompt(20), max_tokens=2))
    engine.step()
    now = 5.0
    engine.run()
    for name in ("runs", "waits"):
        assert isinstance(engine.last[name].error, DeadlineExceeded)
        assert engine.last[name].finish_reason is FinishReason.ERROR
    assert engine.tokens["patient"] == oracle(prompt(20), 2)
    assert engine.core.stats().num_finished[FinishReason.ERROR] == 2


@pytest.mark.parametrize(
    "break_it", [
        lambda result: StepResult(result.step_id + 1, result.token_ids),
        lambda result: StepResult(result.step_id, []),
        lambda result: StepResult(result.step_id, [None]),
    ])
def test_a_result_that_does_not_belong_to_the_plan_is_refused(break_it, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    engine = Engine(enable_overlap=False)
    engine.core.add(ask("r", prompt(4)))
    collect = engine.runner.collect
    monkeypatch.setattr(engine.runner, "collect", lambda: break_it(collect()))
    with pytest.raises(EngineFailed, match=r"expected step|samples is True"):
        engine.core.step()


def test_a_plan_is_not_changed_by_later_steps() -> None:
    engine = Engine(num_blocks=7)
    seen: list[tuple[PlannedRow, PlannedRow]] = []
    for name in ("a", "b"):
        engine.core.add(ask(name, prompt(34, first=ord(name)), max_tokens=35))
    while engine.core.has_work:
        engine.step()
        for row in engine.runner.plans[-1].rows:
            kept = PlannedRow(
                row.request_id, copy(row.token_ids), row.start, tuple(row.block_ids), row.samples,
                row.output_position, row.params)
            seen.append((row, kept))
    assert all(row == kept for row, kept in seen)


def test_who_shares_a_prefix_that_is_being_computed_waits_for_it_and_hits() -> None:
    engine = Engine(max_num_batched_tokens=64)
    shared = prompt(160)
    for index in range(8):
        engine.add(ask(f"r{index}", [*shared, *prompt(10, first=index + 5)], max_tokens=2))
    engine.add(ask("other", prompt(20, first=4), max_tokens=2))
    last = engine.run()
    assert [last[f"r{index}"].num_cached_tokens for index in range(8)] == [0] + [160] * 7
    computed = sum(plan.num_tokens for plan in engine.runner.plans) - 9  # a decode row each
    assert computed == 170 + 7 * 10 + 20
    assert next(iter(engine.last)) == "other"  # whom nobody holds back


def test_admission_leaves_room_for_what_runs_to_grow() -> None:
    for headroom_fraction, is_admitted in ((0.0, True), (0.3, False)):
        engine = Engine(num_blocks=10, headroom_fraction=headroom_fraction)
        engine.add(ask("runs", prompt(60), max_tokens=10))
        engine.step()
        engine.add(ask("b", prompt(60, first=4), max_tokens=4))
        engine.step()
        assert ("b" in [name for name, _, _ in rows(engine)]) is is_admitted
        engine.run()
        assert engine.tokens["b"] == oracle(prompt(60, first=4), 4)
        alone = Engine(num_blocks=10, headroom_fraction=headroom_fraction)
        assert alone.run(ask("all", prompt(159), max_tokens=1))


def test_no_more_run_than_leave_prompts_their_share_of_the_budget() -> None:
    engine = Engine(max_num_seqs=16, max_num_batched_tokens=16, min_prefill_fraction=0.25)
    for index in range(16):
        engine.add(ask(f"r{index}", prompt(4, first=index), max_tokens=60))
    for _ in range(30):
        engine.step()
    assert engine.core.stats().num_running == 12
    engine.core.abort("r3")
    engine.add(ask("urgent", prompt(40, first=20), max_tokens=1, priority=-1))
    for _ in range(20):
        engine.step()
    assert "urgent" in engine.last


def test_a_better_class_is_admitted_and_computed_first() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(ask("runs", prompt(4), max_tokens=3))
    engine.step()
    for name, priority in (("low", 5), ("plain", 0), ("high", -5), ("plain2", 0)):
        engine.add(ask(name, prompt(9, first=ord(name[0])), max_tokens=2, priority=priority))
    assert list(engine.run()) == ["runs", "high", "plain", "plain2", "low"]
