from __future__ import annotations

import math
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

NOT_FINITE = (math.nan, math.inf, -math.inf)
HUGE = 10**400  # beyond any float
WRONG: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, 2**31, HUGE, 1.5, "4", None, True),
    "n": (0, 65, -1, 2.0, HUGE),
    "temperature": (*NOT_FINITE, -0.1, 2.1, HUGE, "hot", None, True),
    "top_k": (-1, 2**31, HUGE, 2.5),
    "top_p": (*NOT_FINITE, 0.0, -0.5, 1.1),
    "min_p": (*NOT_FINITE, -0.1, 1.1),
    "seed": (-1, 2**64, 1.5, "7", True),
    "presence_penalty": (*NOT_FINITE, -2.1, 2.1),
    "frequency_penalty": (*NOT_FINITE, -2.1, 2.1, HUGE),
    "repetition_penalty": (*NOT_FINITE, 0.0, -1.0, 2.1),
    "min_tokens": (-1, 17, HUGE, 0.5),
    "logprobs": (-1, 21, 1.5, True),
    "prompt_logprobs": (-1, 21, HUGE),
    "stop_token_ids": (tuple(range(MAX_STOP_TOKEN_IDS + 1)),),
    "logit_bias": ({5: math.nan}, {5: math.inf}, {5: 100.1}, {5: -101}, {5: "1"}, {5: True},
                   dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    "allowed_token_ids": ((), range(MAX_ALLOWED_TOKEN_IDS + 1)),
    "bad_words": (((),), ((5,), ()), (tuple(range(MAX_BAD_WORD_TOKENS + 1)),), ((5,),) * (MAX_BAD_WORDS + 1)),
}
JUST_RIGHT: dict[str, tuple[Any, ...]] = {
    "max_tokens": (1, 2**31 - 1), "n": (1, 64), "temperature": (0, 2, 5e-324), "top_k": (0, 2**31 - 1),
    "top_p": (1, 5e-324), "min_p": (0, 1), "seed": (0, 2**64 - 1), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2), "repetition_penalty": (5e-324, 2), "min_tokens": (0, 16), "logprobs": (0, 20, None),
    "prompt_logprobs": (0, 20, None), "stop_token_ids": (tuple(range(MAX_STOP_TOKEN_IDS)),),
    "logit_bias": ({5: -100, 6: 100},), "allowed_token_ids": ((5,), None), "bad_words": ((), ((5,),) * MAX_BAD_WORDS),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values],
                         ids=lambda value: repr(value)[:24])
def test_a_value_beyond_a_limit_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}") as refusal:
        SamplingParams(**{"max_tokens": 16, name: value})
    assert refusal.value.param == name
    assert len(refusal.value.message) < 600


def test_every_field_with_a_limit_takes_the_values_at_it() -> None:
    assert JUST_RIGHT.keys() == WRONG.keys()
    for name, values in JUST_RIGHT.items():
        for value in values:
            assert getattr(SamplingParams(**{"max_tokens": 16, name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [
    ("logit_bias", {50: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"5": 1.0}), ("stop_token_ids", (5, 50)),
    ("stop_token_ids", (1.5,)), ("stop_token_ids", (True,)), ("allowed_token_ids", (2**40,)),
    ("allowed_token_ids", (5, -1)), ("bad_words", ((5, 50),)), ("bad_words", ((5,), (-1,)))])
def test_an_id_outside_the_vocabulary_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    params = SamplingParams(**{"max_tokens": 16, name: value})
    with pytest.raises(InvalidRequest, match=rf"^{name}: token id .* outside the vocabulary 0\.\.49$") as refusal:
        params.check_vocabulary(50)
    assert refusal.value.param == name


def test_the_last_id_of_the_vocabulary_is_inside() -> None:
    SamplingParams(
        max_tokens=1, logit_bias={0: 1.0, 49: 1.0}, stop_token_ids=(49,), allowed_token_ids=(0, 49),
        bad_words=((49, 0),)).check_vocabulary(50)
