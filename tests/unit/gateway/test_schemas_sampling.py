"""Fields that say how tokens are drawn: each with its bounds, its wrong types and what it becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from common.errors import InvalidRequest, UnsupportedValue
from common.grammar import Grammar, GrammarKind
from gateway.chat_request import ChatRequest
from gateway.completion_request import CompletionRequest
from gateway.order import Order
from tests.unit.gateway.bodies import HI, chat, complete, refused

HUGE = 10**400  # beyond any float
# Field → what is sent and what becomes of it, at the bounds and at what asks for nothing.
TAKEN: dict[str, list[tuple[Any, Any]]] = {
    "max_tokens": [(1, 1), (7.0, 7)],
    "min_tokens": [(0, 0), (16, 16)],
    "n": [(1, 1), (64, 64), (2.0, 2)],
    "temperature": [(0, 0), (2, 2), (0.7, 0.7)],
    "top_p": [(1, 1), (1e-300, 1e-300)],
    "top_k": [(0, 0), (-1, 0), (5, 5)],
    "min_p": [(0, 0), (1, 1)],
    "presence_penalty": [(-2, -2), (2, 2), (0, 0)],
    "frequency_penalty": [(-2, -2), (2, 2), (0.0, 0)],
    "repetition_penalty": [(2, 2), (1, 1), (0.1, 0.1)],
    "stop_token_ids": [([], ()), ([3, 4], (3, 4)), (list(range(128)), tuple(range(128)))],
    "ignore_eos": [(True, True), (False, False)],
    "skip_special_tokens": [(False, False), (True, True)],
    "return_token_ids": [(True, True)],
    "return_tokens_as_token_ids": [(True, True)],
    "logit_bias": [({}, {}), ({"5": -100, "6": 100}, {5: -100.0, 6: 100.0}), ({"007": 1}, {7: 1.0})],
    "allowed_token_ids": [([], None), ([5, 6], (5, 6))],
    "bad_words": [([], ()), (["a", "b" * 256], ("a", "b" * 256)), (["x"] * 128, ("x",) * 128)],
    "prompt_logprobs": [(0, 0), (20, 20), (False, None)],
    "truncate_prompt_tokens": [(1, 1), (600, 600)],
    "stop": [("x", ("x",)), (["a", "b"], ("a", "b")), ([], ()), (["s" * 256] * 16, ("s" * 256,) * 16)],
}
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, "4", True, [], 2**31, HUGE],
    "min_tokens": [-1, 17, 0.5, "1", True],
    "n": [0, 65, -1, 1.5, "2", True, HUGE],
    "best_of": [0, 65, "2", True],
    "temperature": [-0.1, 2.1, "hot", True, {}, float("inf"), float("nan"), HUGE],
    "top_p": [0, -0.5, 1.1, "1", float("nan")],
    "top_k": [-2, 2**31, 2.5, "5"],
    "min_p": [-0.1, 1.1, "0", True, float("-inf")],
    "presence_penalty": [-2.1, 2.1, "1", True, float("nan")],
    "frequency_penalty": [-2.1, 2.1, "1", HUGE],
    "repetition_penalty": [0, -1, 2.1, "1"],
    "seed": [-(2**63) - 1, 2**64, 1.5, "7", True],
    "stop": ["", [""], ["x"] * 17, "y" * 257, 5, [5], {}],
    "stop_token_ids": [[-1], ["3"], [True], 5, [2**31], list(range(129))],
    "ignore_eos": [0, "yes"],
    "include_stop_str_in_output": [1],
    "skip_special_tokens": [0],
    "logit_bias": [{"abc": 5}, {"-1": 5}, {"5": 101}, {"5": "1"}, {"5": True}, {"5": None}, [], {"": 1},
                   {str(i): 1 for i in range(1025)}],
    "allowed_token_ids": [[-1], ["5"], 5, [2**31]],
    "bad_words": [[""], ["b" * 257], ["x"] * 129, "x", [5]],
    "prompt_logprobs": [-1, 21, True, 1.5, "1"],
    "truncate_prompt_tokens": [0, -2, 1.5, 2**31, True],
    "return_token_ids": [1],
    "return_tokens_as_token_ids": ["yes"],
    "priority": ["high", 1.5, 2**31, True],
    "cache_salt": [5, "s" * 513],
    "extra_key": [["a"], "s" * 513],
    "stream": [1, "true"],
    "stream_options": [True, {"include_usage": 1}],
    "model": [5, "m" * 513],
}


def short(value: Any) -> str:
    return repr(value)[:24]


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize(("name", "sent", "became"), [
    (name, sent, became) for name, pairs in TAKEN.items() for sent, became in pairs], ids=short)
def test_a_value_within_its_bounds_becomes_part_of_the_order(
    call: Callable[..., Order], name: str, sent: Any, became: Any
) -> None:
    order = call(**{"max_tokens": 16, name: sent})
    assert getattr(order, name) == became
    params = order.sampling_params(16)
    if hasattr(params, name) and name not in ("max_tokens", "bad_words"):
        assert getattr(params, name) == became


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize(("name", "value"), [
    (name, value) for name, values in WRONG.items() for value in values], ids=short)
def test_a_value_beyond_its_bounds_or_of_another_type_is_refused_by_name(
    call: Callable[..., Order], name: str, value: Any
) -> None:
    refusal = refused(call, **{"max_tokens": 16, name: value})
    assert refusal.param is not None
    assert refusal.param.split(".")[0] == name
    assert len(refusal.message) < 1000


@pytest.mark.parametrize(("model", "prompt"), [(ChatRequest, HI), (CompletionRequest, {"prompt": "A B"})])
def test_the_document_of_the_api_has_the_same_bounds(model: type[BaseModel], prompt: dict[str, Any]) -> None:
    """But for what is no JSON, and what depends on another field."""
    schema = model.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    allows = jsonschema.Draft202012Validator(schema).is_valid
    refused_but_allowed = [
        (name, value) for name, values in WRONG.items() for value in values
        if value == value and allows({**prompt, name: value})]
    taken_but_not_allowed = [
        (name, sent) for name, pairs in TAKEN.items() for sent, _ in pairs if not allows({**prompt, name: sent})]
    zero_with_echo = [("max_tokens", 0)] if model is CompletionRequest else []
    assert refused_but_allowed == [*zero_with_echo, ("min_tokens", 17)]
    assert taken_but_not_allowed == []


@settings(deadline=None)
@given(st.integers(-(2**63), 2**64 - 1))
def test_any_seed_of_64_bits_is_mapped_into_the_unsigned_range(seed: int) -> None:
    assert chat(seed=seed).seed == seed % 2**64


def test_the_field_that_the_limit_came_in_is_the_one_that_is_named() -> None:
    order = chat(max_tokens=5, max_completion_tokens=3)
    assert (order.max_tokens, order.max_tokens_param) == (3, "max_completion_tokens")
    assert refused(chat, max_tokens=5, max_completion_tokens=0).param == "max_completion_tokens"
    assert refused(chat, max_completion_tokens=4, min_tokens=5).param == "min_tokens"
    assert chat(min_tokens=5).max_tokens is None


def test_no_output_at_all_is_only_for_an_echo() -> None:
    order = complete(max_tokens=0, echo=True, logprobs=1)
    assert (order.max_tokens, order.echo, order.logprobs) == (0, True, 1)
    assert refused(complete, max_tokens=0).param == "max_tokens"
    assert refused(complete, max_tokens=0, echo=False).param == "max_tokens"
    assert refused(chat, max_tokens=0).param == "max_tokens"
    assert complete().max_tokens == 16


@pytest.mark.parametrize(("sent", "became"), [
    ({}, None), ({"logprobs": False}, None), ({"logprobs": False, "top_logprobs": 0}, None),
    ({"top_logprobs": 0}, None),
    ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": None}, 0), ({"logprobs": True, "top_logprobs": 0}, 0),
    ({"logprobs": True, "top_logprobs": 20}, 20)])
def test_a_chat_counts_alternatives_only_where_it_asks_for_logprobs(sent: dict[str, Any], became: int | None) -> None:
    assert chat(**sent).logprobs == became


@pytest.mark.parametrize(("sent", "param"), [
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs"), ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": False, "top_logprobs": 5}, "top_logprobs"), ({"logprobs": 5}, "logprobs"),
    ({"logprobs": "yes"}, "logprobs")])
def test_alternatives_of_a_chat_that_cannot_be_are_refused(sent: dict[str, Any], param: str) -> None:
    assert refused(chat, **sent).param == param


def test_a_completion_asks_for_logprobs_by_their_number() -> None:
    assert [complete(logprobs=asked).logprobs for asked in (None, False, 0, 5, 20)] == [None, None, 0, 5, 20]
    for wrong in (-1, 21, True, 1.5, "1"):
        assert refused(complete, logprobs=wrong).param == "logprobs"


def test_an_echo_with_logprobs_asks_the_engine_for_those_of_the_prompt() -> None:
    def asked(**sent: Any) -> int | None:
        return complete(**sent).sampling_params(4).prompt_logprobs

    assert asked(logprobs=1) is None
    assert asked(echo=True) is None
    assert asked(echo=True, logprobs=1) == 1
    assert asked(echo=True, logprobs=1, prompt_logprobs=3) == 3
    assert complete(echo=True, logprobs=1).prompt_logprobs is None  # which the client did not ask to be told of


def test_logprobs_of_the_prompt_do_not_stream() -> None:
    assert refused(chat, prompt_logprobs=1, stream=True).param == "prompt_logprobs"
    assert refused(complete, prompt_logprobs=0, stream=True).param == "prompt_logprobs"
    chat(prompt_logprobs=False, stream=True)
    complete(echo=True, logprobs=1, stream=True)


def test_best_of_is_at_least_n() -> None:
    for n, best_of in ((1, 1), (1, 5), (3, 3), (64, 64)):
        assert complete(n=n, best_of=best_of).n == n
    assert refused(complete, n=3, best_of=2).param == "best_of"


def test_a_prompt_is_cut_to_what_the_context_leaves_for_the_output() -> None:
    assert complete(truncate_prompt_tokens=-1, max_tokens=100).truncate_prompt_tokens == 412
    assert chat(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1  # the output limit is not known here
    assert complete(truncate_prompt_tokens=-1, max_tokens=512).truncate_prompt_tokens == 1


def test_stream_options_are_only_for_streams() -> None:
    assert refused(chat, stream_options={}).param == "stream_options"
    assert refused(chat, stream=False, stream_options={"include_usage": True}).param == "stream_options"
    for options in ({}, {"include_usage": None}, {"include_usage": True, "continuous_usage_stats": True},
                    {"include_obfuscation": False}):
        chat(stream=True, stream_options=options)


def test_a_refusal_made_behind_the_gateway_names_the_field_as_it_was_sent() -> None:
    grammar = Grammar(GrammarKind.REGEX, "a")
    order = Order("r", chat().model, (1,), 4, "max_completion_tokens", grammar=grammar,
                  grammar_param="structured_outputs.regex", prompt_param="input_ids")
    for behind, sent in (
        (UnsupportedValue("grammar: regex: no such thing", param="grammar"),
         UnsupportedValue("structured_outputs.regex: regex: no such thing", param="structured_outputs.regex")),
        (InvalidRequest("prompt: token id 9 is outside the vocabulary", param="prompt"),
         InvalidRequest("input_ids: token id 9 is outside the vocabulary", param="input_ids")),
        (InvalidRequest("seed: no", param="seed"), InvalidRequest("seed: no", param="seed")),
        (InvalidRequest("of no field"), InvalidRequest("of no field")),
    ):
        told = order.as_sent(behind)
        assert (type(told), told.message, told.param) == (type(sent), sent.message, sent.param)
    with pytest.raises(InvalidRequest, match=r"^max_completion_tokens: must be 1") as refusal:
        order.sampling_params(0)
    assert refusal.value.param == "max_completion_tokens"
