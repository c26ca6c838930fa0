"""Tools of a chat: which of them the model is shown, may call, must call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import UnsupportedValue
from common.tokenized import ChatPrompt
from gateway.chat_request import ChatRequest
from gateway.order import Order, ToolUse
from gateway.output_parsers import FORCED_PARSER, Formats
from gateway.request_body import parse
from tests.unit.gateway.bodies import FACTS, FORMATS, HI, chat, refused, tool

OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("f", parameters=OBJECT, strict=True), tool("g.h-1")]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def shown(order: Order) -> list[Any]:
    assert isinstance(order.prompt, ChatPrompt)
    return list(order.prompt.tools)


@pytest.mark.parametrize(("choice", "tools", "use", "num_shown"), [
    (None, TOOLS, ToolUse("hermes", ("f", "g.h-1")), 2), ("auto", TOOLS, ToolUse("hermes", ("f", "g.h-1")), 2),
    ("none", TOOLS, None, 0), ("none", None, None, 0), ("auto", None, None, 0), ("auto", [], None, 0),
    ("required", TOOLS, ToolUse(FORCED_PARSER, ("f", "g.h-1"), is_forced=True), 2),
    (named("f"), TOOLS, ToolUse(FORCED_PARSER, ("f",), is_forced=True), 2),
    (allowed("auto", "f"), TOOLS, ToolUse("hermes", ("f",)), 1),
    (allowed("auto"), TOOLS, None, 0),
    (allowed("required", "g.h-1"), TOOLS, ToolUse(FORCED_PARSER, ("g.h-1",), is_forced=True), 1)])
def test_a_choice_says_which_tools_are_shown_and_which_calls_are_read(
    choice: Any, tools: Any, use: ToolUse | None, num_shown: int
) -> None:
    order = chat(tool_choice=choice, tools=tools)
    assert order.tools == use
    assert len(shown(order)) == num_shown
    is_forced = use is not None and use.is_forced
    assert (order.grammar is not None) == is_forced
    assert order.reasoning_parser == ("" if is_forced else FORMATS.reasoning_parser)
    if is_forced:
        assert order.grammar_param == "tools"


def test_one_call_at_most_is_asked_by_parallel_tool_calls() -> None:
    for sent, one in ((None, False), (True, False), (False, True)):
        for choice in ("auto", "required"):
            use = chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=sent).tools
            assert use is not None
            assert use.one_at_most is one
    one_call, calls = (chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=many).grammar
                       for many in (False, True))
    assert one_call != calls


def test_a_named_choice_constrains_the_output_to_that_function() -> None:
    grammar = chat(tools=TOOLS, tool_choice=named("f")).grammar
    assert grammar is not None
    assert "city" in grammar.text
    assert "g.h-1" not in grammar.text


def test_tools_are_shown_as_they_were_sent() -> None:
    assert shown(chat(tools=TOOLS)) == TOOLS


def test_a_model_that_writes_calls_in_no_known_way_still_makes_those_it_has_to() -> None:
    def order(choice: str) -> Order:
        body = {**HI, "tools": TOOLS, "tool_choice": choice}
        return parse(ChatRequest, json.dumps(body).encode()).orders(FACTS, Formats())[0]

    assert order("auto").tools is None
    assert len(shown(order("auto"))) == 2
    forced = order("required")
    assert forced.tools == ToolUse(FORCED_PARSER, ("f", "g.h-1"), is_forced=True)
    assert forced.grammar is not None


@pytest.mark.parametrize(("choice", "tools"), [
    ("required", None), ("required", []), (named("f"), []), (named("nope"), TOOLS), ("bogus", TOOLS), ("bogus", None),
    (5, TOOLS), ([], TOOLS), ({}, TOOLS), ({"type": "function"}, TOOLS), ({"type": "function", "function": {}}, TOOLS),
    ({"type": "function", "function": {"name": ["f"]}}, TOOLS), ({"type": "web_search"}, TOOLS),
    (allowed("auto", "nope"), TOOLS), (allowed("never", "f"), TOOLS), (allowed("required"), TOOLS),
    ({"type": "allowed_tools"}, TOOLS), ({"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, TOOLS),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}, TOOLS),
    ({"type": "allowed_tools", "allowed_tools": {"mode": ["auto"], "tools": []}}, TOOLS)])
def test_a_choice_that_cannot_be_met_is_refused(choice: Any, tools: Any) -> None:
    assert refused(chat, tool_choice=choice, tools=tools).param == "tool_choice"


@pytest.mark.parametrize(("tools", "param"), [
    ({}, "tools"), ([5], "tools.0"), ([{"type": None, "function": {"name": "f"}}], "tools.0.type"),
    ([{"type": "function"}], "tools.0.function"), ([{"type": "function", "function": {}}], "tools.0.function.name"),
    ([tool("")], "tools.0.function.name"), ([tool("a b")], "tools.0.function.name"),
    ([tool("x" * 65)], "tools.0.function.name"), ([tool("f\n")], "tools.0.function.name"),
    ([tool("é")], "tools.0.function.name"), ([tool("f"), tool("g"), tool("f")], "tools.2.function.name"),
    ([tool("f"), tool("g", parameters=[])], "tools.1.function.parameters"),
    ([tool("f", parameters={"type": "string"})], "tools.0.function.parameters"),
    ([tool("f", parameters={"type": ["object", "null"]})], "tools.0.function.parameters"),
    ([tool(f"f{i}") for i in range(129)], "tools")])
def test_a_wrong_tool_is_refused_by_its_path_whatever_the_choice(tools: Any, param: str) -> None:
    for choice in (None, "none", "required"):
        assert refused(chat, tools=tools, tool_choice=choice).param == param


def test_tools_at_their_bounds_are_taken() -> None:
    for tools in ([tool(f"f{i}") for i in range(128)], [tool("x" * 64)], [tool("f", parameters={})],
                  [tool("f", parameters={"type": "object"})], [tool("f", parameters={"properties": {}})]):
        assert len(shown(chat(tools=tools))) == len(tools)


def test_tools_of_another_type_are_not_offered() -> None:
    refusal = refused(chat, tools=[{"type": "web_search"}])
    assert (type(refusal), refusal.param) == (UnsupportedValue, "tools.0.type")


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "title": "Answer"}}}


def test_where_no_tool_may_be_called_a_constraint_is_all_there_is() -> None:
    alone = chat(response_format=SCHEMA).grammar
    assert chat(tools=TOOLS, tool_choice="none", response_format=SCHEMA).grammar == alone
    assert chat(tools=[], response_format=SCHEMA).grammar == alone
    assert chat(tools=TOOLS, response_format={"type": "text"}).grammar is None


def test_calls_that_have_to_be_made_are_not_constrained_otherwise() -> None:
    for choice in ("required", named("f")):
        forced = chat(tools=TOOLS, tool_choice=choice)
        for constraint in ({"response_format": SCHEMA}, {"regex": "a"}):
            order = chat(tools=TOOLS, tool_choice=choice, **constraint)
            assert (order.grammar, order.tools, order.grammar_param) == (forced.grammar, forced.tools, "tools")


def test_beside_tools_that_may_be_called_a_json_schema_is_of_the_answer() -> None:
    for choice in (None, "auto", {"type": "auto"}):
        order = chat(tools=TOOLS, tool_choice=choice, response_format=SCHEMA)
        assert order.tools == ToolUse(FORCED_PARSER, ("f", "g.h-1"))
        assert (order.reasoning_parser, order.grammar_param) == ("", "response_format.json_schema.schema")
        assert order.grammar is not None
        assert "Answer" in order.grammar.text
        assert "g.h-1" in order.grammar.text
    for constraint in ({"regex": "a"}, {"ebnf": 'root ::= "a"'}, {"guided_choice": ["a"]}):
        refusal = refused(chat, tools=TOOLS, **constraint)
        assert refusal.param == next(iter(constraint))
        assert "tool_choice" in refusal.message


def test_spellings_of_a_choice_that_mean_one_thing_are_one_choice() -> None:
    for choice, plain in (({"type": "function", "name": "f"}, named("f")), ({"type": "none"}, "none"),
                          ({"type": "auto"}, "auto"), ({"type": "required"}, "required")):
        one, other = (chat(tools=TOOLS, tool_choice=spelling) for spelling in (choice, plain))
        assert (one.tools, one.grammar, one.prompt) == (other.tools, other.grammar, other.prompt)
    untyped = chat(tools=[{"function": TOOLS[0]["function"]}, TOOLS[1]])
    assert shown(untyped) == TOOLS


@pytest.mark.parametrize(("sent", "place", "param"), [
    ({"tool_choice": "required"}, "/items/anyOf/1/properties/arguments/properties/city", "parameters.properties.city"),
    ({"tool_choice": named("b")}, "/anyOf/0/properties/arguments", "parameters"),
    ({"tool_choice": allowed("required", "b")}, "/items/anyOf/0/properties/arguments", "parameters"),
    ({"response_format": SCHEMA}, "/anyOf/1/anyOf/1/properties/arguments", "parameters"),
    ({"response_format": SCHEMA}, "/anyOf/0/properties/x", "response_format.json_schema.schema.properties.x")])
def test_a_refused_part_of_a_schema_is_named_by_the_clients_own_path(
    sent: dict[str, Any], place: str, param: str
) -> None:
    order = chat(tools=[tool("a", parameters=OBJECT), tool("b", parameters=OBJECT)], **sent)
    param = param if param.startswith("response") else f"tools.1.function.{param}"
    error = UnsupportedValue(f"grammar: schema: keyword 'not' at {place} is not supported", param="grammar")
    refusal = order.as_sent(error)
    assert (type(refusal), refusal.param) == (UnsupportedValue, param)
    assert refusal.message == f"{param}: schema: keyword 'not' at {param} is not supported"
