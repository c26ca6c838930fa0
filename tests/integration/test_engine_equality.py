"""One answer, however it came to be: float32, the real scheduler, the real runner, exact tokens.

The reference is each request alone, whole, on an engine of its own without overlap. Every draw of every condition is
also compared with transformers' logits of the same tokens, and the reference's tokens with a plain sampler on those
logits. Each condition proves that it happened.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from engine.grammar.state import GrammarState
from engine.outputs import FinishReason
from engine.request import EngineRequest
from tests import reference_sampler
from tests.engine_runs import AloneAnswers, EngineRun, LoadedModel, assert_same
from tests.model_factories import ARCHITECTURES, VARIANTS, tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

MAX_LEN = 160
NUM_TOKENS = 24
DECIDED_BY = 1e-4  # of a draw's scores; logits of two ways to the same KV are up to 1e-5 apart
# A tiny gemma3 with tied embeddings only repeats its last token.
MODELS = ARCHITECTURES | {"gemma3": VARIANTS["gemma3 with biases, untied"]}
MAIN = "gemma3"  # stands for all where the default run takes one: it has windows, two kinds of layers, norms everywhere
ROOMY = {"num_blocks": 256, "max_num_batched_tokens": 256, "max_num_seqs": 16}
TIGHT = {"num_blocks": 26, "max_num_batched_tokens": 48, "max_num_seqs": 6}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({
    "type": "object", "properties": {
        "name": {"type": "string", "maxLength": 5}, "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"enum": ["red", "green", "colour"]}},
    "required": ["name", "count", "tags"], "additionalProperties": False}))
NUMBER = Grammar(GrammarKind.REGEX, r"(the|a) (row|plan) is [0-9]{4} and the dog is (red|green)")

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 11},
    "truncated": {"temperature": 1.2, "seed": 12, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    "penalized": {"temperature": 0.7, "seed": 13, "frequency_penalty": 0.8, "presence_penalty": 0.4,
                  "repetition_penalty": 1.3},
    "rewarded": {"temperature": 0.0, "frequency_penalty": -0.6, "bad_words": ((7,), (9, 8))},
    "biased": {"temperature": 0.8, "seed": 14, "logit_bias": {40: 4.0, 41: 4.0, 42: -100.0},
               "allowed_token_ids": tuple(range(20, 120))},
    "scored": {"temperature": 0.8, "seed": 15, "prompt_logprobs": 2},
    "schema": {"temperature": 0.8, "seed": 16, "grammar": SCHEMA, "max_tokens": 60, "logprobs": None},
    "schema, token by token": {"temperature": 0.8, "seed": 16, "grammar": SCHEMA, "max_tokens": 60},
    "regex": {"temperature": 0.7, "seed": 17, "grammar": NUMBER, "max_tokens": 60, "logprobs": None,
              "frequency_penalty": 1.5, "repetition_penalty": 1.2},
}
MANY = ("seeded", "penalized", "scored", "schema", "regex")  # of which several choices run


def params(**change: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "logprobs": 3, "ignore_eos": True} | change)


def prompt(seed: float, num_tokens: int, first: int = 3, last: int = 190) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(first, last) for _ in range(num_tokens)]


def request(name: str, asked: dict[str, Any], **fields: Any) -> EngineRequest:
    """Prompts of 6 to 41 tokens; those of a grammar share one."""
    index = list(KINDS).index(name.removesuffix(" again")) if name.removesuffix(" again") in KINDS else len(KINDS)
    tokens = prompt(77, 30) if "grammar" in asked else prompt(index, 41 - 5 * index)
    return EngineRequest(name, tokens, params(**asked), **fields)


class Expected(AloneAnswers):
    """With the requests whose answers are compared."""

    def __init__(self, name: str, model: LoadedModel, tokenizer: Tokenizer) -> None:
        super().__init__(model)
        self.name = name
        self.tokenizer = tokenizer

    @cached_property
    def requests(self) -> list[EngineRequest]:
        """One of each kind, and one that a stop token ends."""
        asked = [request(name, kind) for name, kind in KINDS.items()]
        seeded = asked[list(KINDS).index("seeded")]
        drawn = self.answer(seeded).token_ids
        assert len(set(drawn)) > 8  # a model that repeats itself proves nothing
        stop = next(token for i, token in enumerate(drawn) if i > 8 and token not in drawn[:i])
        return [*asked, dataclasses.replace(seeded, request_id="stopped", params=dataclasses.replace(
            seeded.params, stop_token_ids=(stop,), ignore_eos=False, min_tokens=3))]

    def engine(self, **config: Any) -> EngineRun:
        return EngineRun(self.model, **config)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    """By architecture, each made once."""
    @cache
    def make(architecture: str) -> Expected:
        folder = tmp_path_factory.mktemp(architecture)
        reference = tiny_model(folder, MODELS[architecture], seed=5)
        tokenizer = tiny_tokenizer(folder)
        return Expected(architecture, LoadedModel(folder, reference, MAX_LEN), tokenizer)

    return make


@pytest.fixture(params=MODELS)
def each(request: pytest.FixtureRequest, models: Callable[[str], Expected]) -> Expected:
    return models(request.param)


@pytest.fixture(params=[pytest.param(name, marks=[] if name == MAIN else pytest.mark.full) for name in MODELS])
def expected(request: pytest.FixtureRequest, models: Callable[[str], Expected]) -> Expected:
    return models(request.param)


def strangers(seed: int, num: int = 4) -> list[EngineRequest]:
    """Requests as a client without a seed makes them."""
    rng = random.Random(seed)
    return [EngineRequest(f"stranger {i}", prompt(rng.random(), rng.randrange(3, 60)), params(
        seed=rng.getrandbits(64), temperature=rng.choice((0.0, 0.8, 1.5)), max_tokens=rng.randrange(1, 30)))
        for i in range(num)]


def test_alone_every_token_is_the_one_that_a_plain_sampler_draws_from_the_logits_of_transformers(
    each: Expected
) -> None:
    model = each.model
    for asked in each.requests if each.name == MAIN else each.requests[::3]:
        answer, state = each.answer(asked), model.grammar_of(asked)
        is_ended = state is not None or asked.request_id == "stopped"
        assert answer.finish_reason is (FinishReason.STOP if is_ended else FinishReason.LENGTH)
        logits = model.reference_logits([*asked.prompt_token_ids, *answer.token_ids])[len(asked.prompt_token_ids) - 1 :]
        for position, token in enumerate(answer.token_ids):
            changed = reference_sampler.changed_logits(
                logits[position].tolist(), asked.params, asked.prompt_token_ids, answer.token_ids[:position],
                model.config.eos_token_ids, allowed_by(state, model.config.vocab_size))
            assert token == reference_sampler.draw(changed, asked.params, position), (asked.request_id, position)
            if state is not None:
                state.accept([token])


def allowed_by(state: GrammarState | None, vocab_size: int) -> set[int] | None:
    if state is None:
        return None
    words = np.empty(-(-vocab_size // 32), np.uint32)
    state.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_a_forced_run_has_the_tokens_of_drawing_one_by_one_in_fewer_steps(expected: Expected) -> None:
    runs = {name: expected.answer(one) for one in expected.requests if (name := one.request_id) in KINDS}
    forced, drawn = runs["schema"], runs["schema, token by token"]
    assert forced.token_ids == drawn.token_ids
    assert forced.timing is not None
    assert drawn.timing is not None
    assert forced.timing.num_steps < drawn.timing.num_steps == len(drawn.token_ids)
    written = json.loads(expected.tokenizer.decode(forced.token_ids))
    assert list(written) == ["name", "count", "tags"]


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_batched_with_strangers(each: Expected, overlap: bool) -> None:
    run = each.engine(**ROOMY, enable_overlap=overlap)
    answers = run.run(*strangers(1), *each.requests)
    each.check(run, answers)
    assert run.runner.most_rows >= len(each.requests)
    assert (run.runner.num_unknown > 0) == overlap
    assert run.stats.num_preemptions == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_chunked_at_random_sizes_beside_strangers(expected: Expected, seed: int) -> None:
    rng = random.Random(seed)
    run = expected.engine(max_num_batched_tokens=rng.randrange(6, 12), max_num_seqs=5,
                          block_size=rng.choice((1, 3, 4, 16)), num_blocks=1024)
    expected.check(run, run.run(*rng.sample([*strangers(seed), *expected.requests], 4 + len(expected.requests)),
                                gap=rng.randrange(1, 4)))
    assert len(set(run.runner.chunk_sizes)) > 4
    timing = run.answers["greedy", 0].timing
    assert timing
    assert timing.num_chunks > 3


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_and_computed_again(expected: Expected, overlap: bool) -> None:
    """The latest are preempted first, so one run has them in the other order."""
    run = expected.engine(**TIGHT, enable_overlap=overlap, enable_prefix_caching=False)
    expected.check(run, run.run(*expected.requests[:: 1 if overlap else -1]))
    preempted = {name for (name, _), answer in run.answers.items() if answer.timing and answer.timing.num_preemptions}
    assert len(preempted) > 3
    assert preempted & {"penalized", "rewarded", "schema", "schema, token by token", "regex"}
    assert run.stats.num_recomputed_tokens > 50
    assert run.stats.num_swapped_in_blocks == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_and_brought_back_from_a_lower_tier(expected: Expected, overlap: bool) -> None:
    run = expected.engine(**TIGHT, enable_overlap=overlap, swap_blocks=200)
    expected.check(run, run.run(*expected.requests[:: 1 if overlap else -1]))
    stats = run.stats
    assert stats.num_preemptions > 3
    assert stats.num_swapped_out_blocks >= stats.num_swapped_in_blocks > 10


def test_preempted_with_a_lower_tier_that_lost_most_of_it(expected: Expected) -> None:
    run = expected.engine(**TIGHT, swap_blocks=3)
    expected.check(run, run.run(*expected.requests))
    stats = run.stats
    assert stats.num_swapped_in_blocks > 0
    assert stats.num_recomputed_tokens > 0


def test_prefix_cached_of_itself_and_of_strangers(expected: Expected) -> None:
    """A second time on the same engine, and beside a stranger that goes on where the prompt's half is."""
    run = expected.engine(**ROOMY)
    run.run(*(dataclasses.replace(
        one, request_id=f"stranger {one.request_id}", params=params(max_tokens=9),
        prompt_token_ids=[*one.prompt_token_ids[: len(one.prompt_token_ids) // 2], 5, 6, 7])
        for one in expected.requests))
    expected.check(run, run.run(*expected.requests))
    first = {name: answer.num_cached_tokens for (name, _), answer in run.answers.items() if name in KINDS}
    again = expected.engine(**ROOMY)
    for _ in range(2):
        again.answers.clear()
        expected.check(again, again.run(*expected.requests))
    for one in expected.requests:
        num_cached = again.answers[one.request_id, 0].num_cached_tokens
        size = len(one.prompt_token_ids)
        assert num_cached == (0 if one.params.prompt_logprobs is not None else (size - 1) // 4 * 4)
        assert first.get(one.request_id, 1) <= num_cached
    assert sum(first.values()) > 20


def test_an_answer_that_is_the_next_prompt_is_cached_with_its_generated_blocks(expected: Expected) -> None:
    run = expected.engine(**ROOMY)
    turn = expected.requests[1]
    run.run(turn)
    tokens = [*turn.prompt_token_ids, *run.answers[turn.request_id, 0].token_ids]
    turns = (dataclasses.replace(turn, request_id="next turn", prompt_token_ids=[*tokens, 9, 9, last])
             for last in range(9, 20))
    expected.check(run, run.run(next(turn for turn in turns if is_decided(expected, turn))))
    assert run.answers["next turn", 0].num_cached_tokens > len(turn.prompt_token_ids) + 12


def is_decided(expected: Expected, asked: EngineRequest) -> bool:
    """No draw of its answer is a tie but for float32's rounding, which differs with how the KV came to be."""
    prompt, drawn = list(asked.prompt_token_ids), expected.answer(asked).token_ids
    logits = expected.model.reference_logits([*prompt, *drawn]).tolist()
    return all(reference_sampler.margin(logits[len(prompt) + position - 1], asked.params, position) > DECIDED_BY
               for position in range(len(drawn)))


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT | {"num_blocks": 44}], ids=["roomy", "tight"])
def test_each_of_several_choices_is_the_request_with_that_choice_alone(
    expected: Expected, sizes: dict[str, int]
) -> None:
    run = expected.engine(**sizes, swap_blocks=50)
    for one in expected.requests:
        if one.request_id in MANY:
            several = dataclasses.replace(one, params=dataclasses.replace(one.params, n=3))
            run.expect(several)
            run.core.add(several, expected.model.grammar_of(several))
    expected.check(run, run.run(*strangers(3)))
    assert run.runner.num_copies > 2
    assert (run.stats.num_preemptions > 0) == (sizes is not ROOMY)
    assert len({tuple(run.answers["seeded", choice].token_ids) for choice in range(3)}) == 3


@pytest.mark.parametrize("seed", [1, 2])
def test_resumed_on_a_new_engine_at_a_random_token(expected: Expected, seed: int) -> None:
    rng = random.Random(seed)
    run = expected.engine(**ROOMY | {"max_num_batched_tokens": 40})
    places: dict[str, tuple[int, int]] = {}
    for one in expected.requests:
        choice = rng.randrange(2) if one.params.temperature else 0
        num_drawn = rng.randrange(1, len(expected.answer(one, choice).token_ids))
        places[one.request_id] = choice, num_drawn
        run.add(dataclasses.replace(
            one, choice=choice, output_token_ids=expected.answer(one, choice).token_ids[:num_drawn]))
    run.run(*strangers(4))
    for name, (choice, num_drawn) in places.items():
        one = run.asked[name]
        assert_same(run.answers[name, choice], expected.answer(one, choice).after(num_drawn), (name, num_drawn))
    run.assert_logits_of_transformers()


def test_prefilled_by_another_engine(expected: Expected) -> None:
    """The KV of all tokens but the last comes over as bytes, in full blocks and a part of one."""
    prefill, decode = expected.engine(**ROOMY), expected.engine(**ROOMY)
    for one in expected.requests:
        if one.params.prompt_logprobs is not None:
            continue
        name = one.request_id
        prefill.core.add(dataclasses.replace(one, prefill_only=True))
        while prefill.core.has_work:
            prefill.core.step()
        reserved = decode.core.reserve(one, expected.model.grammar_of(one))
        decode.expect(one)
        for source, target in zip(prefill.core.block_ids(name), reserved.block_ids, strict=False):
            decode.core.block_view(target)[:] = prefill.core.block_view(source)
        prefill.core.release(name)
        decode.core.land(name, len(one.prompt_token_ids) - 1)
        decode.core.start(name)
    expected.check(decode, decode.run(*strangers(6)))
    assert {answer.timing and answer.timing.num_chunks for (name, _), answer in decode.answers.items()
            if name in KINDS and name != "scored"} == {1}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 30))])
def test_anything_at_once(each: Expected, seed: int) -> None:
    """Random sizes, arrivals, copies and ends of strangers, with or without overlap, cache and lower tier."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 8, 16))
    run = each.engine(
        block_size=block_size, num_blocks=rng.randrange(104, 400) // block_size,
        max_num_batched_tokens=rng.randrange(10, 80), max_num_seqs=rng.randrange(2, 9),
        enable_overlap=rng.random() < 0.7, enable_prefix_caching=rng.random() < 0.7, headroom_fraction=rng.random() / 5,
        swap_blocks=rng.choice((0, 20, 100)))
    asked = []
    for one in [*strangers(seed, 8), *each.requests]:
        n = rng.randrange(1, 4) if one.request_id in MANY else 1
        asked.append(dataclasses.replace(
            one, params=dataclasses.replace(one.params, n=n), priority=rng.randrange(3),
            cache_salt=rng.choice(("", "a"))))
    rng.shuffle(asked)
    each.check(run, run.run(
        *asked, gap=rng.randrange(3), at={rng.randrange(60): f"stranger {i}" for i in range(4)}))
