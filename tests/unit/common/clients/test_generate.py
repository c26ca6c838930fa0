"""What workers take from the wire is checked there, whoever sent it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from common.clients.generate import (
    delta_from_proto,
    delta_to_proto,
    generation_from_proto,
    generation_to_proto,
    params_from_proto,
    params_to_proto,
)
from common.errors import InvalidRequest
from common.generation import Generation, TokenDelta, TokenLogprobs
from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from common.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from proto import common_pb2, decode_pb2

FULL = SamplingParams(
    max_tokens=9, temperature=0.5, top_k=3, top_p=0.9, seed=2**64 - 1, ignore_eos=True, stop_token_ids=(7, 8),
    logit_bias={0: -100.0, 9: 2.5}, n=64, min_p=0.25, presence_penalty=-2.0, frequency_penalty=2.0,
    repetition_penalty=1.5, min_tokens=9, logprobs=0, prompt_logprobs=20, allowed_token_ids=(1, 2),
    bad_words=((5,), (6, 7)), grammar=Grammar(GrammarKind.REGEX, "a+"))
PLAIN: dict[str, Any] = {"max_tokens": 16, "top_p": 1.0}


def test_all_fields_survive_the_wire_and_absent_ones_are_neutral() -> None:
    assert params_from_proto(params_to_proto(FULL)) == FULL
    assert params_from_proto(common_pb2.SamplingParams(**PLAIN)) == SamplingParams(max_tokens=16, temperature=0.0)
    for kind in GrammarKind:
        params = SamplingParams(max_tokens=1, grammar=Grammar(kind, "x"))
        assert params_from_proto(params_to_proto(params)).grammar == params.grammar


@pytest.mark.parametrize(("name", "value"), [
    ("max_tokens", 0), ("max_tokens", 2**32 - 1), ("n", 65), ("n", 2**32 - 1), ("top_k", 2**32 - 1), ("top_p", 0.0),
    *((name, value) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
                                 "repetition_penalty") for value in (math.nan, math.inf, -math.inf, -2.5, 2.5)),
    ("min_tokens", 17), ("logprobs", 21), ("prompt_logprobs", 2**32 - 1), ("stop_token_ids", [5] * 129),
    ("logit_bias", {5: math.nan}), ("logit_bias", {5: 101.0}),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    ("bad_words", [common_pb2.TokenIds()]), ("bad_words", [common_pb2.TokenIds(ids=[5] * 33)]),
    ("bad_words", [common_pb2.TokenIds(ids=[5])] * 257),
    ("grammar", common_pb2.Grammar(regex="a" * (MAX_GRAMMAR_BYTES + 1)))], ids=lambda value: repr(value)[:24])
def test_a_wrong_value_on_the_wire_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    submit = decode_pb2.Submit(request_id="r", prompt_token_ids=[5], params=common_pb2.SamplingParams(
        **PLAIN | {name: value}))
    with pytest.raises(InvalidRequest, match=f"^{name}") as refusal:
        generation_from_proto(submit)
    assert refusal.value.param == name


def test_hashes_of_a_wrong_length_are_refused() -> None:
    submit = decode_pb2.Submit(block_hashes=bytes(31), params=common_pb2.SamplingParams(**PLAIN))
    with pytest.raises(InvalidRequest, match="31 bytes is not a multiple of 16") as refusal:
        generation_from_proto(submit)
    assert refusal.value.param == "block_hashes"


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_what_a_resumed_request_brings_and_its_priority_survive_the_wire(priority: int) -> None:
    generation = Generation(
        "r", "m", (5, 6), (b"h" * 16,), FULL, adapter="a", cache_salt="s", timeout_s=1.5, output_token_ids=(7, 8),
        attempt=2, choice=63, priority=priority)
    assert generation_from_proto(generation_to_proto(generation)) == generation


def test_the_outputs_of_several_choices_at_once_are_refused_not_left_out() -> None:
    resume = decode_pb2.Resume(output_token_ids=[common_pb2.TokenIds(ids=[i]) for i in (7, 8)])
    submit = decode_pb2.Submit(resume=resume, params=common_pb2.SamplingParams(**PLAIN))
    with pytest.raises(InvalidRequest, match="output_token_ids: of one choice, got those of 2") as refusal:
        generation_from_proto(submit)
    assert refusal.value.param == "output_token_ids"


def test_a_grammar_of_an_unknown_kind_is_refused_not_left_out() -> None:
    submit = decode_pb2.Submit(params=common_pb2.SamplingParams(**PLAIN, grammar=common_pb2.Grammar()))
    with pytest.raises(InvalidRequest, match="grammar: of no kind that is known here") as refusal:
        generation_from_proto(submit)
    assert refusal.value.param == "grammar"


@pytest.mark.parametrize("scores", [(), (None,), (None, TokenLogprobs(-0.5, (3,), (-0.25,)))], ids=len)
def test_prompt_logprobs_survive_the_wire_also_those_of_one_token(scores: tuple[TokenLogprobs | None, ...]) -> None:
    delta = TokenDelta("r", (5,), prompt_logprobs=scores)
    assert delta_from_proto(delta_to_proto(delta)) == delta
