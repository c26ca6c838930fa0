from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, UnsupportedValue
from common.generation import ModelFacts
from gateway import metrics, unsupported
from gateway.order import Order
from gateway.request_body import parse
from gateway.schemas import ChatRequest, CompletionRequest, TokenizeRequest

FACTS = ModelFacts("m", 512, 0)
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5)


def chat(**changes: Any) -> Order:
    return parse(ChatRequest, json.dumps({**HI, **changes}).encode()).order(FACTS)


@given(st.sampled_from(sorted({*ChatRequest.model_fields, *unsupported.NEUTRAL_IN_CHAT})), JSON_VALUES)
def test_any_value_of_any_field_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    refused: InvalidRequest | None = None
    try:
        chat(**{field: value}).sampling_params(4)
    except InvalidRequest as error:
        refused = error
    if refused is not None:
        assert refused.param is not None
        assert refused.param.split(".")[0] == field
        assert len(refused.message) < 1000


@pytest.mark.parametrize("field", sorted({*ChatRequest.model_fields, *unsupported.NEUTRAL_IN_CHAT} - {"messages"}))
def test_null_is_as_good_as_absent(field: str) -> None:
    order, bare = chat(**{field: None}), chat()
    assert order.max_tokens is bare.max_tokens is None
    assert (order.temperature, order.top_p, order.skip_special_tokens) == (1.0, 1.0, True)


@pytest.mark.parametrize(("name", "value", "fine"), [
    ("n", 1, True), ("n", 1.0, True), ("n", True, False), ("n", 2, False), ("echo", False, True), ("echo", 0, False),
    ("response_format", {"type": "text"}, True), ("response_format", {"type": "json_object"}, False),
    ("regex", "a", False), ("presence_penalty", 0, True), ("presence_penalty", -0.1, False)])
def test_a_field_that_is_not_offered_passes_only_with_a_value_that_asks_for_nothing(
    name: str, value: Any, fine: bool
) -> None:
    if fine:
        chat(**{name: value})
        return
    with pytest.raises(UnsupportedValue) as refused:
        chat(**{name: value})
    assert refused.value.param == name


def test_unknown_fields_are_ignored_and_counted_and_known_hints_are_not() -> None:
    before = metrics.UNKNOWN_FIELDS._value.get()
    chat(zzz=1, yyy=None, user="u", metadata={})
    assert metrics.UNKNOWN_FIELDS._value.get() - before == 2


@given(st.integers(-(2**63), 2**64 - 1))
def test_any_seed_of_64_bits_is_mapped_into_the_unsigned_range(seed: int) -> None:
    assert chat(seed=seed).seed == seed % 2**64


def test_a_million_bad_items_cost_one_error() -> None:
    for body in (b'{"messages":[' + b"1," * 10**6 + b"1]}", b'{"prompt":[' + b"1.5," * 10**6 + b"1]}"):
        model = ChatRequest if b"messages" in body else CompletionRequest
        with pytest.raises(InvalidRequest) as refused:
            parse(model, body)
        assert len(refused.value.message) < 300


@pytest.mark.parametrize(("choice", "tools", "kind"), [
    ("auto", None, None), ("none", [], None), ("required", None, InvalidRequest),
    ({"type": "function", "function": {"name": "f"}}, [], InvalidRequest), ("bogus", ["f"], InvalidRequest),
    ("required", ["f"], UnsupportedValue), ({"type": "function", "function": {"name": "f"}}, ["f"], UnsupportedValue)])
def test_a_tool_choice_that_would_have_to_be_enforced_is_refused(choice: Any, tools: Any, kind: Any) -> None:
    listed = tools and [{"type": "function", "function": {"name": name}} for name in tools]
    if kind is None:
        chat(tool_choice=choice, tools=listed)
        return
    with pytest.raises(InvalidRequest) as refused:
        chat(tool_choice=choice, tools=listed)
    assert type(refused.value) is kind
    assert refused.value.param == "tool_choice"


def test_tools_reach_the_template_unless_the_choice_is_none() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}]
    assert list(chat(tools=tools).prompt.tools) == tools  # type: ignore[union-attr]
    assert list(chat(tools=tools, tool_choice="none").prompt.tools) == []  # type: ignore[union-attr]
    with pytest.raises(UnsupportedValue, match=r"tools\.0\.type"):
        chat(tools=[{"type": "web_search"}])


def test_tokenize_wants_a_text_or_a_conversation_and_not_both() -> None:
    assert parse(TokenizeRequest, b'{"prompt": ""}').source() == ""
    for body in ({}, {"prompt": "x", **HI}):
        with pytest.raises(InvalidRequest, match="prompt"):
            parse(TokenizeRequest, json.dumps(body).encode()).source()
