"""What comes out with a token: forced tokens, logprobs, timing; and what never does."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from common.generation import RequestTiming
from engine.mock_runner import MockMode, mock_logprobs
from engine.outputs import FinishReason
from tests.unit.engine.builders import Engine, ask, oracle, prompt
from tests.unit.engine.fake_grammar import FakeGrammar

overlaps = pytest.mark.parametrize("enable_overlap", [True, False])


@overlaps
@pytest.mark.parametrize("seed", range(6))
def test_forced_tokens_come_with_the_one_before_and_their_kv_is_one_chunk(enable_overlap: bool, seed: int) -> None:
    engine = Engine(enable_overlap=enable_overlap)
    grammar = FakeGrammar(seed, length=30)
    engine.add(ask("r", prompt(20), max_tokens=50), grammar.fork())
    engine.run()
    wanted = oracle(prompt(20), 50, 0, grammar)
    assert engine.tokens["r"] == wanted
    assert engine.last["r"].finish_reason is FinishReason.STOP
    assert engine.last["r"].stop_token_id is None
    runs = [len(output.new_token_ids) for output in engine.outputs["r"]]
    assert max(runs) > 2
    assert len(engine.runner.plans) < len(wanted)
    chunks = [len(row.token_ids) for plan in engine.runner.plans for row in plan.chunks[0:]][1:]
    assert max(chunks) >= max(runs[:-1]) - enable_overlap


@overlaps
def test_forced_and_drawn_one_by_one_are_the_same_tokens(enable_overlap: bool) -> None:
    grammar = FakeGrammar(3, length=30)
    tokens = []
    for fields in ({}, {"logprobs": 0}):
        engine = Engine(enable_overlap=enable_overlap)
        engine.add(ask("r", prompt(20), max_tokens=50, **fields), grammar.fork())
        engine.run()
        tokens.append(engine.tokens["r"])
    assert tokens[0] == tokens[1] == oracle(prompt(20), 50, 0, grammar)
    assert all(len(output.new_token_ids) == len(output.logprobs) == 1 for output in engine.outputs["r"])


@overlaps
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 11])
def test_a_forced_run_ends_with_the_length(enable_overlap: bool, max_tokens: int) -> None:
    grammar = FakeGrammar(1, length=30)
    engine = Engine(enable_overlap=enable_overlap)
    engine.add(ask("r", prompt(20), max_tokens=max_tokens), grammar.fork())
    engine.run()
    assert engine.tokens["r"] == oracle(prompt(20), max_tokens, 0, grammar)
    assert engine.last["r"].finish_reason is FinishReason.LENGTH


def test_constrained_and_free_ones_run_together_and_are_preempted_with_their_state() -> None:
    engine = Engine(num_blocks=12, block_size=4, max_num_batched_tokens=20, max_num_seqs=6, poisons=True)
    grammars = {f"r{i}": FakeGrammar(i, length=25) if i % 2 else None for i in range(8)}
    for name, grammar in grammars.items():
        engine.add(ask(name, prompt(7, first=ord(name[1])), max_tokens=30), grammar and grammar.fork())
    engine.run()
    assert engine.core.stats().num_preemptions > 0
    for name, grammar in grammars.items():
        assert engine.tokens[name] == oracle(prompt(7, first=ord(name[1])), 30, 0, grammar)


def test_a_resumed_output_is_replayed_and_a_finished_one_ends_at_once() -> None:
    grammar = FakeGrammar(4, length=20)
    whole = oracle(prompt(20), 50, 0, grammar)
    engine = Engine()
    engine.add(ask("r", prompt(20), max_tokens=50, output_token_ids=whole[:7]), grammar.fork())
    engine.add(ask("done", prompt(20), max_tokens=50, output_token_ids=whole), grammar.fork())
    engine.run()
    assert engine.tokens["r"] == whole
    assert engine.last["done"].finish_reason is FinishReason.STOP
    assert engine.tokens["done"] == whole
    with pytest.raises(InvalidRequest, match="not allowed"):
        engine.core.add(ask("wrong", prompt(20), max_tokens=50, output_token_ids=[2]), grammar.fork())
    assert "wrong" not in engine.core


class Broken(FakeGrammar):
    def accept(self, token_ids: object) -> None:
        raise InvalidRequest("grammar: too large", param="grammar")


def test_a_grammar_that_fails_ends_its_own_request_alone() -> None:
    engine = Engine()
    engine.add(ask("r", prompt(20)), Broken(1, 9))
    engine.add(ask("other", prompt(20, first=4)))
    engine.run()
    assert isinstance(engine.last["r"].error, InvalidRequest)
    assert engine.tokens["r"] == []
    assert engine.tokens["other"] == oracle(prompt(20, first=4), 8)


@overlaps
def test_logprobs_come_with_each_token_and_the_prompts_with_the_first(enable_overlap: bool) -> None:
    engine = Engine(max_num_batched_tokens=64, enable_overlap=enable_overlap)
    engine.run(ask("warm", prompt(150), max_tokens=1))
    engine.run(ask("r", prompt(150), n=2, logprobs=0, prompt_logprobs=0), ask("free", prompt(9, first=5)))
    for name in ("r", "r#1"):
        assert [out.logprobs for out in engine.outputs[name]] == [(mock_logprobs(t),) for t in engine.tokens[name]]
    first, *others = engine.outputs["r"]
    assert first.prompt_logprobs == (None, *(mock_logprobs(token_id) for token_id in prompt(150)[1:]))
    assert not any(output.prompt_logprobs for output in [*others, *engine.outputs["r#1"], *engine.outputs["free"]])
    assert not any(output.logprobs for output in engine.outputs["free"])
    assert engine.last["r"].num_cached_tokens == 0


def test_prompt_logprobs_of_a_preempted_prompt_are_made_again_and_put_out_once() -> None:
    engine = Engine(num_blocks=8, max_num_batched_tokens=2, max_num_seqs=2, min_prefill_fraction=0.0)
    engine.add(ask("runs", prompt(34), max_tokens=60))
    while "runs" not in engine.progress:
        engine.step()
    engine.run(ask("r", prompt(60, first=4), max_tokens=3, prompt_logprobs=1))
    assert engine.core.stats().num_preemptions > 0
    (scores,) = [output.prompt_logprobs for output in engine.outputs["r"] if output.prompt_logprobs]
    assert scores == (None, *(mock_logprobs(token_id) for token_id in prompt(60, first=4)[1:]))


def test_kv_from_elsewhere_and_prompt_logprobs_do_not_go_together() -> None:
    with pytest.raises(InvalidRequest, match="prompt_logprobs") as caught:
        Engine().core.reserve(ask("r", prompt(20), prompt_logprobs=0))
    assert caught.value.param == "prompt_logprobs"


@overlaps
def test_timing_comes_with_the_first_token_and_with_the_last(enable_overlap: bool) -> None:
    now = 10.0
    engine = Engine(max_num_batched_tokens=64, clock=lambda: now, enable_overlap=enable_overlap)
    engine.add(ask("r", prompt(150), max_tokens=4))
    now = 12.0
    while engine.core.has_work:
        engine.step()
        now += 1.0
    late = float(enable_overlap)  # a step's result comes with the next call
    timings = [output.timing for output in engine.outputs["r"]]
    assert timings[1:-1] == [None, None]
    assert timings[0] == RequestTiming(2.0, 2.0 + late, 0.0, 3, 3, 0)
    assert timings[-1] == RequestTiming(2.0, 2.0 + late, 3.0, 3, 6, 0)


def test_no_stop_ends_an_output_before_min_tokens() -> None:
    engine = Engine(MockMode.ECHO)
    for min_tokens, num_outputs in ((0, 3), (2, 3), (3, 4), (5, 6)):
        name = f"r{min_tokens}"
        engine.run(ask(name, [7, 8], max_tokens=9, min_tokens=min_tokens))
        assert len(engine.tokens[name]) == num_outputs
        assert engine.last[name].finish_reason is FinishReason.STOP


def test_forced_tokens_that_a_grammar_then_refuses_are_not_counted() -> None:
    seed = next(seed for seed in range(99) if len(FakeGrammar(seed, 30).forced()) > 2)
    engine = Engine()
    engine.add(ask("r", prompt(20), max_tokens=30), FakeGrammar(seed, 30, max_accepted=1))
    engine.run()
    assert isinstance(engine.last["r"].error, InvalidRequest)
    assert (engine.last["r"].num_output_tokens, engine.core.stats().num_generated_tokens) == (0, 0)
