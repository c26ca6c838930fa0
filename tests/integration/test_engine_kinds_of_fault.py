"""Faults that other engines have shipped, tried on this one in process: real scheduler, real runner, a tiny model."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import ContextLengthExceeded, InvalidRequest, UnsupportedValue
from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from engine.loop import EngineLoop
from engine.outputs import FinishReason, RequestOutput
from engine.request import EngineRequest
from tests.engine_runs import AloneAnswers, Answer, EngineRun, LoadedModel, assert_same
from tests.model_factories import ARCHITECTURES, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

WAIT_S = 60.0
FULL = pytest.mark.full
VOCAB_SIZE = 256
EXTRA = {"max_tokens": 16, "temperature": 0.8, "ignore_eos": True}
WORDS = Grammar(
    GrammarKind.REGEX, "(the quick|the brown|a lazy) (dog|fox) jumps( over){3}[0-9]{9}( and){3} is (red|green)[0-9]{8}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> AloneAnswers:
    folder = tmp_path_factory.mktemp("model")
    reference = tiny_model(folder, ARCHITECTURES["llama"], seed=9)
    tiny_tokenizer(folder)
    return AloneAnswers(LoadedModel(folder, reference, 192))


def ask(name: str, num_prompt_tokens: int = 20, fields: dict[str, Any] | None = None, **sampling: Any) -> EngineRequest:
    rng = random.Random(name.split("#")[0])
    tokens = [rng.randrange(3, 190) for _ in range(num_prompt_tokens)]
    return EngineRequest(name, tokens, SamplingParams(**EXTRA | sampling), **fields or {})


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=FULL)])
def test_a_seeded_request_is_the_same_five_times_whoever_runs_beside_it(alone: AloneAnswers, overlap: bool) -> None:
    """B11"""
    asked, rng = ask("A", seed=42), random.Random(5)
    want = alone.answer(asked)

    def unseeded(i: int) -> EngineRequest:
        return ask(f"other {rng.random()} {i}", rng.randrange(1, 50), seed=rng.getrandbits(64))

    run = EngineRun(alone.model, enable_overlap=overlap)
    for turn in range(5):
        twin = dataclasses.replace(asked, request_id=f"twin {turn}")
        same_seed = ask(f"same seed {turn}", seed=42)
        for gap, others in ((0, []), (0, [unseeded(0)]), (0, [twin, same_seed]), (0, [unseeded(i) for i in range(7)]),
                            (3, [unseeded(0), unseeded(1)])):
            at = rng.randrange(len(others) + 1)
            run.run(*others[:at], dataclasses.replace(asked, request_id="A"), *others[at:], gap=gap)
            assert run.answers.pop(("A", 0)).token_ids == want.token_ids
        assert run.answers[f"twin {turn}", 0].token_ids == want.token_ids
        assert run.answers[f"same seed {turn}", 0].token_ids != want.token_ids
    assert len({tuple(answer.token_ids) for (name, _), answer in run.answers.items() if "other" in name}) > 40


def test_a_tiny_temperature_draws_the_greedy_tokens(alone: AloneAnswers) -> None:
    """B12"""
    greedy = alone.answer(ask("A", temperature=0.0, max_tokens=40))
    names = {f"A#{t}": t for t in (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-30, 5e-324)}
    run = EngineRun(alone.model)
    run.run(*(ask(name, temperature=t, max_tokens=40, seed=i) for i, (name, t) in enumerate(names.items())))
    for answer in run.answers.values():
        assert answer.token_ids == greedy.token_ids
    assert len(set(greedy.token_ids)) > 5
    run.run(ask("A", temperature=1.5, max_tokens=40))
    assert run.answers["A", 0].token_ids != greedy.token_ids


@pytest.mark.parametrize("num", [0, *(pytest.param(num, marks=FULL) for num in (1, 5, 19)), 20])
@pytest.mark.parametrize("sampling", [
    {"temperature": 0.0}, {"seed": 3, "allowed_token_ids": tuple(range(50, 60)), "frequency_penalty": 1.0}],
    ids=["greedy", "constrained"])
def test_logprobs_are_the_models_own_as_many_as_asked_for(
    alone: AloneAnswers, num: int, sampling: dict[str, Any]
) -> None:
    """B10"""
    asked = ask("A", logprobs=num, prompt_logprobs=num, **sampling)
    run = EngineRun(alone.model, max_num_batched_tokens=16, max_num_seqs=8)
    run.run(ask("B"), asked)
    answer = run.answers["A", 0]
    assert len(answer.logprobs) == len(answer.token_ids) == 16
    assert len(answer.prompt_logprobs) == 20
    assert answer.prompt_logprobs[0] is None
    tokens = [*asked.prompt_token_ids, *answer.token_ids]
    exact = torch.log_softmax(alone.model.reference_logits(tokens).double(), -1).numpy()
    for i, entry in enumerate([*answer.prompt_logprobs[1:], *answer.logprobs]):
        assert entry is not None
        assert entry.logprob == pytest.approx(exact[i, tokens[i + 1]], abs=1e-4)
        assert entry.top_token_ids == tuple(np.argsort(-exact[i], kind="stable")[:num])
        assert entry.top_logprobs == pytest.approx(exact[i, list(entry.top_token_ids)], abs=1e-4)
        assert all(math.isfinite(value) and value <= 0 for value in (entry.logprob, *entry.top_logprobs))
    plain = EngineRun(alone.model).run(dataclasses.replace(asked, params=dataclasses.replace(
        asked.params, logprobs=None, prompt_logprobs=None)))["A", 0]
    assert (plain.token_ids, plain.logprobs, plain.prompt_logprobs) == (answer.token_ids, [], [])


@pytest.mark.parametrize("n", [1, pytest.param(64, marks=FULL), 6])
def test_a_prompt_that_can_never_fit_is_refused_and_one_whose_choices_cannot_all_fit_takes_turns(
    alone: AloneAnswers, n: int
) -> None:
    """B21: a pool of 8 blocks of 16."""
    run = EngineRun(alone.model, num_blocks=8, block_size=16)
    never, small = ask("never", 150, n=n), ask("small", 4, max_tokens=4)
    with pytest.raises(ContextLengthExceeded, match=r"150 tokens .* 128 tokens"):
        run.core.add(never)
    grows = ask("grows", 100, n=n, seed=4, max_tokens=100)
    run.run(grows, small)
    assert_same(run.answers["small", 0], alone.answer(small))
    for choice in (0, n - 1):
        answer = run.answers["grows", choice]
        assert (answer.finish_reason, len(answer.token_ids)) == (FinishReason.LENGTH, 28)
        assert answer.token_ids == alone.answer(grows, choice).token_ids[:28]
    assert len({tuple(run.answers["grows", choice].token_ids) for choice in range(n)}) == n
    assert run.stats.num_preemptions < 3 * n


CHANGES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"frequency_penalty": 1.1, "presence_penalty": 0.5, "repetition_penalty": 1.2, "seed": 2},
    "rewards": {"frequency_penalty": -2.0, "temperature": 0.0},
    "logprobs": {"logprobs": 4, "seed": 3}, "biased": {"logit_bias": {44: 3.0}, "seed": 4, "min_tokens": 30},
    "schema": {"grammar": WORDS, "seed": 5, "frequency_penalty": 1.5},
    "schema, token by token": {"grammar": WORDS, "seed": 5, "frequency_penalty": 1.5, "logprobs": 0},
}


@pytest.mark.parametrize("swap_blocks", [0, 20], ids=["computed again", "swapped"])
@pytest.mark.parametrize("name", [
    name if name in ("penalties", "logprobs", "schema") else pytest.param(name, marks=FULL) for name in CHANGES])
def test_two_requests_in_a_pool_for_one_and_a_half_answer_as_in_a_large_one(
    alone: AloneAnswers, name: str, swap_blocks: int
) -> None:
    """B22, and B23's counts: pool of 7 blocks of 16, two prompts of 34 tokens, 35 tokens of output each."""
    asked = [ask(f"{name} {i}", 34, **{"max_tokens": 35} | CHANGES[name]) for i in range(2)]
    tight = EngineRun(alone.model, num_blocks=7, block_size=16, swap_blocks=swap_blocks, enable_prefix_caching=False,
                      max_awaiting_fraction=1.0)
    large = EngineRun(alone.model, num_blocks=64, block_size=16)
    found, wanted = tight.run(*asked), large.run(*asked)
    assert tight.stats.num_preemptions > 0
    assert (tight.stats.num_swapped_in_blocks > 0, tight.stats.num_recomputed_tokens > 30) == (
        (True, False) if swap_blocks else (False, True))
    assert large.stats.num_preemptions == 0
    for key, answer in found.items():
        assert_same(answer, wanted[key], key)
        assert answer.num_prompt_tokens == 34
        assert len(answer.token_ids) == 35 or (answer.finish_reason is FinishReason.STOP and "schema" in name)
    alone.check(tight, found)


@pytest.mark.parametrize("logprobs", [None, 0], ids=["forced runs", "token by token"])
def test_penalties_count_forced_and_resumed_tokens_once(alone: AloneAnswers, logprobs: int | None) -> None:
    """B23, with forced runs in a draft's place: the places where a digit is drawn show every count."""
    asked = ask("A", grammar=WORDS, frequency_penalty=2.0, max_tokens=60, seed=8, logprobs=logprobs)
    want = alone.answer(asked)
    assert want.finish_reason is FinishReason.STOP
    assert want.token_ids == alone.answer(ask("A#drawn", grammar=WORDS, frequency_penalty=2.0, max_tokens=60, seed=8,
                                              logprobs=0)).token_ids
    for num_drawn in range(1, len(want.token_ids), 4):
        run = EngineRun(alone.model)
        run.run(dataclasses.replace(asked, output_token_ids=want.token_ids[:num_drawn]))
        assert_same(run.answers["A", 0], want.after(num_drawn), num_drawn)


class Running:
    """An engine in its loop's thread, that compiles grammars."""

    def __init__(self, alone: AloneAnswers) -> None:
        self.run = EngineRun(alone.model, max_num_seqs=8)
        self.answers: dict[str, Answer] = {}
        self.fatal: list[Exception] = []
        self._changed = threading.Condition()
        self.loop = EngineLoop(self.run.core, self._on_step, self.fatal.append, grammar_compiler=alone.model.compiler)
        self.loop.start()

    def submit(self, asked: EngineRequest) -> None:
        with self._changed:
            self.answers[asked.request_id] = Answer()
        self.loop.submit(asked)

    def wait(self, name: str, num_tokens: int = 1 << 30) -> Answer:
        """Until it has so many tokens, or has ended."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.answers[name].finish_reason or len(self.answers[name].token_ids) >= num_tokens, WAIT_S)
            return self.answers[name]

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        with self._changed:
            for output in outputs:
                self.answers[output.request_id].take(output)
            self._changed.notify_all()


def schema(**fields: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(fields))


BAD_GRAMMARS: dict[str, Grammar] = {
    "unknown type": schema(type="strng"),
    "unsupported keyword": schema(type="array", uniqueItems=True),
    "no JSON": Grammar(GrammarKind.JSON_SCHEMA, '{"type": '),
    "not a schema": Grammar(GrammarKind.JSON_SCHEMA, "[1]"),
    "NaN": Grammar(GrammarKind.JSON_SCHEMA, '{"minimum": NaN}'),
    "open class": Grammar(GrammarKind.REGEX, "[a-"),
    "open group": Grammar(GrammarKind.REGEX, "("),
    "exploding regex": Grammar(GrammarKind.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "schema bomb": schema(**{"$defs": {f"d{i}": {"type": "object", "properties": {
        name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}} for i in range(600)}, "$ref": "#/$defs/d0"}),
    "deep schema": Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 3000 + "{}" + "}" * 3000),
    "bad Lark": Grammar(GrammarKind.LARK, "start: nowhere"),
    "no choice": Grammar(GrammarKind.CHOICE, "[]"),
}


def test_a_bad_schema_or_regex_is_refused_by_name_and_the_streams_beside_it_are_undisturbed(
    alone: AloneAnswers
) -> None:
    """B09"""
    beside = [ask("stream", max_tokens=150, seed=1), ask("its own grammar", grammar=WORDS, max_tokens=60, seed=2)]
    engine = Running(alone)
    engine.submit(beside[0])
    engine.wait("stream", 3)
    for name, grammar in BAD_GRAMMARS.items():
        engine.submit(ask(name, grammar=grammar))
    engine.submit(beside[1])
    for name in BAD_GRAMMARS:
        answer = engine.wait(name)
        assert answer.finish_reason is FinishReason.ERROR, name
        assert isinstance(answer.error, InvalidRequest), (name, answer.error)
        assert answer.error.param == "grammar"
        assert answer.token_ids == []
    keyword = engine.answers["unsupported keyword"].error
    assert isinstance(keyword, UnsupportedValue)
    assert "uniqueItems" in keyword.message
    for asked in beside:
        engine.wait(asked.request_id)
        assert_same(engine.answers[asked.request_id], alone.answer(asked))
    engine.loop.stop(WAIT_S)
    assert not engine.fatal
    engine.run.core.check_integrity()


BAD_REQUESTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "empty prompt": ("prompt", {"prompt_token_ids": ()}, {}),
    "id below": ("prompt", {"prompt_token_ids": (5, -1)}, {}),
    "id beyond": ("prompt", {"prompt_token_ids": (5, VOCAB_SIZE)}, {}),
    "prompt beyond the context": ("prompt", {"prompt_token_ids": (5,) * 192}, {}),
    "resumed id beyond": ("output_token_ids", {"output_token_ids": (VOCAB_SIZE,)}, {}),
    "nothing left to draw": ("output_token_ids", {"output_token_ids": (5,) * 16}, {}),
    "several choices resumed": ("n", {"output_token_ids": (5,)}, {"n": 2}),
    "several choices, one named": ("n", {"choice": 1}, {"n": 2}),
    "bias beyond": ("logit_bias", {}, {"logit_bias": {999999: 5.0}}),
    "bias below": ("logit_bias", {}, {"logit_bias": {-1: 5.0}}),
    "stop id beyond": ("stop_token_ids", {}, {"stop_token_ids": (VOCAB_SIZE,)}),
    "allowed id beyond": ("allowed_token_ids", {}, {"allowed_token_ids": (2**40,)}),
    "bad word beyond": ("bad_words", {}, {"bad_words": ((5, VOCAB_SIZE),)}),
    "hashes of another key": ("block_hashes", {"block_hashes": [bytes(16)] * 5}, {}),
    "outputs against the grammar": ("grammar", {"output_token_ids": (3,)}, {"grammar": WORDS}),
}


def test_bad_requests_are_refused_by_the_name_of_the_field_and_harm_nobody(alone: AloneAnswers) -> None:
    """B12 and all other limits that the engine itself holds."""
    stream = ask("stream", max_tokens=150, seed=1)
    engine = Running(alone)
    engine.submit(stream)
    engine.wait("stream", 3)
    for name, (_, fields, sampling) in BAD_REQUESTS.items():
        engine.submit(dataclasses.replace(ask(name, **sampling), **fields))
    for name, (param, _, _) in BAD_REQUESTS.items():
        error = engine.wait(name).error
        assert isinstance(error, InvalidRequest | ContextLengthExceeded) or param == "block_hashes", (name, error)
        assert error is not None
        assert getattr(error, "param", None) == param, (name, error)
        assert str(getattr(error, "message", "")).startswith(param), (name, error)
    edges = [ask("lowest", fields={"priority": -(2**31)}), ask("highest", fields={"priority": 2**31 - 1}),
             ask("last choice", fields={"choice": 2**32 - 1}), ask("last id", logit_bias={VOCAB_SIZE - 1: 100.0})]
    for asked in edges:
        engine.submit(asked)
        assert engine.wait(asked.request_id).finish_reason is FinishReason.LENGTH
    assert set(engine.answers["last id"].token_ids) == {VOCAB_SIZE - 1}
    engine.wait("stream")
    assert_same(engine.answers["stream"], alone.answer(stream))
    engine.loop.stop(WAIT_S)
    assert not engine.fatal
    engine.run.core.check_integrity()
