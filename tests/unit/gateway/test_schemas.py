"""Request bodies as a whole: what every field has in common, prompts, conversations, labels and hints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, ShoalError, UnsupportedValue
from common.tokenized import ChatPrompt
from gateway import metrics, unsupported
from gateway.chat_request import ChatRequest
from gateway.completion_request import MAX_CHOICES, MAX_PROMPTS, CompletionRequest
from gateway.field_types import MAX_STOPS, MAX_TOKEN_IDS
from gateway.order import Order
from gateway.request_body import parse
from gateway.text_requests import TokenizeRequest
from tests.unit.gateway.bodies import FACTS, FORMATS, HI, chat, complete, completions, refused, tool

CHAT_FIELDS = sorted({*ChatRequest.model_fields, *unsupported.NEUTRAL_IN_CHAT})
COMPLETION_FIELDS = sorted({*CompletionRequest.model_fields, *unsupported.NEUTRAL_IN_COMPLETIONS})
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=5)
WORDS = sorted({
    "type", "function", "name", "parameters", "schema", "json_schema", "json", "regex", "choice", "grammar",
    "json_object", "required", "auto", "none", "text", "role", "user", "content", "tools", "mode", "allowed_tools",
    "root ::= [a-", "structural_tag", "tool_calls", "image_url", "string", "object"})
SHAPED_VALUES = st.recursive(
    JSON_VALUES | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12)


@settings(deadline=None)
@given(st.sampled_from(CHAT_FIELDS), JSON_VALUES)
def test_any_value_of_any_field_of_a_chat_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    _taken_or_refused_by_name(chat, field, value)


@settings(deadline=None)
@given(st.sampled_from(COMPLETION_FIELDS), JSON_VALUES)
def test_any_value_of_any_field_of_a_completion_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    _taken_or_refused_by_name(completions, field, value)


def _taken_or_refused_by_name(call: Callable[..., Any], field: str, value: Any) -> None:
    refusal: InvalidRequest | None = None
    try:
        call(**{field: value})
    except InvalidRequest as error:
        refusal = error
    if refusal is not None:
        assert refusal.param is not None
        assert refusal.param.split(".")[0] == field
        assert len(refusal.message) < 1000


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({*CHAT_FIELDS, *COMPLETION_FIELDS})), SHAPED_VALUES, max_size=6))
def test_no_body_raises_anything_but_an_error_of_ours(body: dict[str, Any]) -> None:
    for filled, model in (({**HI, **body}, ChatRequest), ({"prompt": "x", **body}, CompletionRequest)):
        for shape in (body, filled):
            try:
                request = parse(model, json.dumps(shape).encode())
                orders = request.orders(FACTS, FORMATS) if isinstance(request, ChatRequest) else request.orders(FACTS)
            except ShoalError:
                continue
            assert orders
            assert all(isinstance(order, Order) for order in orders)


@settings(deadline=None)
@given(st.one_of(st.binary(max_size=40), JSON_VALUES.map(lambda value: json.dumps(value).encode())))
def test_no_bytes_raise_anything_but_an_error_of_ours(raw: bytes) -> None:
    for model in (ChatRequest, CompletionRequest, TokenizeRequest):
        status = 200
        try:
            parse(model, raw)
        except ShoalError as error:
            status = error.http_status
        assert status in (200, 400)


@pytest.mark.parametrize("field", [name for name in CHAT_FIELDS if name != "messages"])
def test_null_is_as_good_as_absent_in_a_chat(field: str) -> None:
    assert _without_what_differs(chat(**{field: None})) == _without_what_differs(chat())


@pytest.mark.parametrize("field", [name for name in COMPLETION_FIELDS if name != "prompt"])
def test_null_is_as_good_as_absent_in_a_completion(field: str) -> None:
    assert _without_what_differs(complete(**{field: None})) == _without_what_differs(complete())


def _without_what_differs(order: Order) -> dict[str, Any]:
    return {field.name: getattr(order, field.name) for field in dataclasses.fields(Order)
            if field.compare and field.name not in ("request_id", "seed")}


@pytest.mark.parametrize("call", [chat, complete])
@pytest.mark.parametrize(("name", "value", "fine"), [
    ("use_beam_search", False, True), ("use_beam_search", True, False), ("use_beam_search", 0, False),
    ("length_penalty", 1, True), ("length_penalty", 1.0, True), ("length_penalty", True, False),
    ("length_penalty", 2, False), ("stop_regex", "a", False), ("lora_path", "x", False),
    ("kv_transfer_params", {}, False), ("spaces_between_special_tokens", True, True),
    ("spaces_between_special_tokens", False, False), ("thinking_token_budget", 5, False)])
def test_a_field_that_is_not_offered_passes_only_with_a_value_that_asks_for_nothing(
    call: Callable[..., Order], name: str, value: Any, fine: bool
) -> None:
    if fine:
        call(**{name: value})
        return
    refusal = refused(call, **{name: value})
    assert (type(refusal), refusal.param) == (UnsupportedValue, name)


def test_a_completion_has_no_suffix_and_a_chat_no_echo() -> None:
    complete(suffix="")
    assert refused(complete, suffix="x").param == "suffix"
    chat(echo=False)
    assert refused(chat, echo=True).param == "echo"


def test_unknown_fields_are_ignored_and_counted_and_known_labels_are_not() -> None:
    before = metrics.UNKNOWN_FIELDS._value.get()
    chat(zzz=1, yyy=None, user="u", metadata={}, rid="r", request_id="q", store=True, stream_interval=4)
    assert metrics.UNKNOWN_FIELDS._value.get() - before == 2


def test_a_million_bad_items_cost_one_error() -> None:
    for body in (b'{"messages":[' + b"1," * 10**6 + b"1]}", b'{"prompt":[' + b"1.5," * 10**6 + b"1]}",
                 b'{"messages":[],"tools":[' + b"1," * 10**6 + b"1]}"):
        model = ChatRequest if b"messages" in body else CompletionRequest
        with pytest.raises(InvalidRequest) as refusal:
            parse(model, body)
        assert len(refusal.value.message) < 300


@pytest.mark.parametrize(("body", "reason"), [
    (b'{"prompt":[' + b"[1]," * 10**6 + b"[1]]}", "lists, objects and keys"),
    (b'{"prompt":[' + b"1," * (2 * 10**6) + b"1]}", "items"),
    (b'{"prompt":"' + b'\\\\\\",[:' * 10**5 + b'","x":[' + b'{"a":[]},' * 10**5 + b"1]}", "lists, objects and keys")])
def test_more_values_than_a_request_can_have_are_refused_unparsed(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the body has .* {reason}"):
        parse(CompletionRequest, body)


def test_a_text_may_have_any_characters_that_part_values() -> None:
    hurdle = b'\\\\\\",[:{'
    assert parse(CompletionRequest, b'{"prompt":"' + hurdle * 10**6 + b'"}').prompt == '\\",[:{' * 10**6


def test_a_list_says_how_many_items_it_may_have() -> None:
    for sent in (["x"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1), [1] * (MAX_TOKEN_IDS + 1)):
        most = MAX_TOKEN_IDS if sent[0] == 1 else MAX_PROMPTS
        assert f"at most {most} items" in refused(completions, prompt=sent).message
    assert refused(chat, stop=["x"] * (MAX_STOPS + 1)).param == "stop"


@pytest.mark.parametrize(("prompt", "prompts"), [
    ("ab", ["ab"]), (["ab"], ["ab"]), (["a", "b", "a"], ["a", "b", "a"]), ([1, 2], [(1, 2)]),
    ([[1], [2, 3]], [(1,), (2, 3)]), (["x"] * MAX_PROMPTS, ["x"] * MAX_PROMPTS)])
def test_a_batch_is_one_order_for_each_prompt_in_their_order(prompt: Any, prompts: list[Any]) -> None:
    orders = completions(prompt=prompt, seed=7)
    assert [order.prompt for order in orders] == prompts
    assert len({order.request_id for order in orders}) == len(prompts)
    assert {order.seed for order in orders} == {7}


@pytest.mark.parametrize("prompt", [
    ..., "", [], [""], [[]], ["a", ""], [[1], []], ["x"] * (MAX_PROMPTS + 1), [1, "a"], [[1], "a"], [-1], 5, {},
    [None]])
def test_a_prompt_that_is_none_is_refused_by_name(prompt: Any) -> None:
    param = refused(completions, prompt=prompt).param
    assert param is not None
    assert param.split(".")[0] == "prompt"


def test_choices_of_all_prompts_together_are_bounded() -> None:
    assert len(completions(prompt=["x"] * 4, n=64)) * 64 == MAX_CHOICES
    assert refused(completions, prompt=["x"] * 5, n=64).param == "n"


def test_token_ids_may_come_in_a_field_of_their_own() -> None:
    order = chat(input_ids=[1, 2], messages=...)
    assert (order.prompt, order.prompt_param) == ((1, 2), "input_ids")
    assert refused(chat, input_ids=[1, 2]).param == "input_ids"
    assert refused(chat, input_ids=[], messages=...).param == "input_ids"
    assert refused(chat, messages=...).param == "messages"
    assert [order.prompt for order in completions(prompt=..., input_ids=[[1], [2]])] == [(1,), (2,)]
    assert refused(completions, input_ids=[1]).param == "input_ids"


@pytest.mark.parametrize(("sent", "order"), [
    ({}, 0), ({"service_tier": "auto"}, 0), ({"service_tier": "flex"}, 10), ({"service_tier": "priority"}, -10),
    ({"service_tier": "another"}, 0), ({"priority": 3}, 3), ({"priority": 0, "service_tier": "flex"}, 0),
    ({"priority": -(2**31) + 1}, -(2**31) + 1)])
def test_the_order_in_which_requests_run_is_theirs_or_that_of_their_tier(sent: dict[str, Any], order: int) -> None:
    assert chat(**sent).priority == order


def test_a_key_of_affinity_is_the_bodys_before_the_headers() -> None:
    def key(**body: Any) -> str:
        request = parse(ChatRequest, json.dumps({**HI, **body}).encode())
        return request.orders(FACTS, affinity_key="header")[0].affinity_key

    assert key() == "header"
    assert key(session_id="s") == "s"
    assert key(session_id="s", prompt_cache_key="k") == "k"
    assert refused(chat, session_id="s" * 513).param == "session_id"


@settings(deadline=None)
@given(*[st.tuples(st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
                   st.none() | st.text(st.characters(exclude_categories=["Cs"])))] * 2)
def test_two_pairs_of_salt_and_extra_key_never_share_prefix_hits(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None]
) -> None:
    salts = [chat(cache_salt=salt, extra_key=key).cache_salt for salt, key in (one, other)]
    same = [(salt or "", key or "") for salt, key in (one, other)]
    assert (salts[0] == salts[1]) == (same[0] == same[1])


def test_a_salt_stays_as_it_is_and_has_no_nul_as_it_would_read_as_salt_and_key() -> None:
    assert chat(cache_salt="a b").cache_salt == "a b"
    for key in (None, "c"):
        assert refused(chat, cache_salt="a\0b", extra_key=key).param == "cache_salt"


def test_hints_about_reasoning_reach_the_template_and_the_answer() -> None:
    def kwargs(**sent: Any) -> dict[str, Any]:
        prompt = chat(**sent).prompt
        assert isinstance(prompt, ChatPrompt)
        return dict(prompt.template_kwargs)

    assert kwargs() == {}
    assert kwargs(reasoning_effort="high") == {"reasoning_effort": "high"}
    assert kwargs(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert kwargs(reasoning_effort="none", enable_thinking=True)["enable_thinking"] is True
    assert kwargs(enable_thinking=False, chat_template_kwargs={"enable_thinking": True}) == {"enable_thinking": True}
    assert chat().reasoning_parser == FORMATS.reasoning_parser
    assert chat(separate_reasoning=False).reasoning_parser == ""
    assert (chat().include_reasoning, chat(include_reasoning=False).include_reasoning) == (True, False)


@pytest.mark.parametrize(("messages", "param"), [
    ([], "messages"), ([{"role": "robot", "content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"), ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "system", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": ["x"] * 1025}], "messages.0.content"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}], "messages.0.tool_calls"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}],
     "messages.0.content.1.type"),
    ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function")])
def test_a_wrong_message_is_refused_by_its_path(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages).param == param


@pytest.mark.parametrize(("message", "shown"), [
    ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
     {"role": "user", "content": "a\nb", "name": "n"}),
    ({"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
     {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}),
    ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
    ({"role": "assistant", "content": None, "reasoning": "hm"},
     {"role": "assistant", "content": "", "reasoning_content": "hm"}),
    ({"role": "assistant", "content": "x", "reasoning_content": "hm"},
     {"role": "assistant", "content": "x", "reasoning_content": "hm"}),
    ({"role": "tool", "tool_call_id": "1", "content": "ok"}, {"role": "tool", "content": "ok", "tool_call_id": "1"}),
    ({"role": "tool", "content": None}, {"role": "tool", "content": ""}),
    ({"role": "function", "name": "f", "content": "ok"}, {"role": "tool", "content": "ok", "name": "f"}),
    ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
    ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, {"role": "user", "content": "a\nb"}),
    ({"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "b"}]},
     {"role": "assistant", "content": "b", "reasoning_content": "hm"}),
    ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
     {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]})])
def test_a_turn_reaches_the_template_in_its_words(message: dict[str, Any], shown: dict[str, Any]) -> None:
    prompt = chat(messages=[message]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert list(prompt.messages) == [shown]


def test_a_template_never_comes_from_a_client() -> None:
    assert refused(chat, chat_template="{{ 1 }}").param == "chat_template"
    assert refused(chat, chat_template_kwargs={"tools": []}).param == "chat_template_kwargs.tools"


def test_tokenize_wants_a_text_or_a_conversation_and_not_both() -> None:
    assert parse(TokenizeRequest, b'{"prompt": ""}').source() == ""
    for body in ({}, {"prompt": "x", **HI}):
        with pytest.raises(InvalidRequest, match="prompt"):
            parse(TokenizeRequest, json.dumps(body).encode()).source()
    with_tool = parse(TokenizeRequest, json.dumps({**HI, "tools": [tool("f")]}).encode()).source()
    assert isinstance(with_tool, ChatPrompt)
    assert list(with_tool.tools) == [tool("f")]


def test_every_field_has_a_description() -> None:
    for model in (ChatRequest, CompletionRequest):
        described = model.model_json_schema()["properties"]
        assert [name for name, field in described.items() if "description" not in field] == []
