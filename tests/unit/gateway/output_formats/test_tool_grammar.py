from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from common.errors import InvalidRequest, UnsupportedValue
from common.grammar import MAX_GRAMMAR_BYTES, Grammar
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.state import GrammarState
from gateway.output_formats.tool_grammar import FORCED_PARSER, MAX_CALLS, Answer, ToolSpec, tool_grammar
from tests.tiny_tokenizer import tiny_tokenizer
from tests.unit.gateway.output_formats.builders import Outcome, parser_of, read

END = 2
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]}},
    "required": ["city"]}
TREE = {
    "$defs": {"node": {
        "type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["value"], "additionalProperties": False}},
    "type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "required": ["root"]}
TOOLS = [ToolSpec("get_weather", WEATHER), ToolSpec("ping"), ToolSpec("a.b-c", TREE), ToolSpec('q"\\', {})]
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "ping": {"maxProperties": 0}, "a.b-c": TREE,
                           'q"\\': {"maxProperties": 0}}
NAMES = tuple(SCHEMAS)


class Model:
    """Tokens of the tiny tokenizer: takes texts, and writes what a grammar lets it."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = tiny_tokenizer(folder)
        self.compiler = GrammarCompiler(folder, 256, frozenset((END,)))

    def takes(self, grammar: Grammar, text: str) -> bool:
        state, token_ids = self.compiler.compile(grammar), self.tokenizer.encode(text).ids
        assert self.tokenizer.decode(token_ids) == text
        try:
            state.accept([*token_ids, END])
        except InvalidRequest:
            return False
        return state.is_finished

    def write(self, grammar: Grammar, seed: int, max_tokens: int = 1500) -> str:
        """Any output; after a while one that closes what is open where it can."""
        drawn, state = random.Random(seed), self.compiler.compile(grammar)
        token_ids: list[int] = []
        closing = [self.tokenizer.token_to_id(text) for text in ("]", "}", '"')]
        while not state.is_finished:
            assert len(token_ids) < max_tokens
            allowed = _allowed(state)
            closers = [token for token in closing if token in allowed]
            if END in allowed and drawn.random() < 0.5:
                break
            token = closers[0] if closers and drawn.random() < len(token_ids) / 100 else drawn.choice(allowed)
            state.accept([token])
            token_ids.append(token)
        return str(self.tokenizer.decode(token_ids))


def _allowed(state: GrammarState) -> list[int]:
    words = np.empty(8, np.uint32)
    state.fill(words)
    return [int(token) for token in np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("tiny"))


def forced(named: str | None = None, *, parser: str = "none", one_at_most: bool = False) -> Grammar:
    return tool_grammar(parser, TOOLS, named=named, one_at_most=one_at_most).grammar


def call(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@pytest.mark.parametrize("parser", ["none", "llama3_json"])
@pytest.mark.parametrize("one_at_most", [False, True])
@pytest.mark.parametrize("named", [None, *NAMES])
def test_whatever_follows_the_grammar_is_calls_that_satisfy_their_tools_schemas(
    model: Model, named: str | None, one_at_most: bool, parser: str
) -> None:
    for seed in range(10):
        text = model.write(forced(named, parser=parser, one_at_most=one_at_most), seed)
        outcome = read(parser_of(FORCED_PARSER, NAMES), list(text))
        assert outcome.content == ""
        assert 1 <= len(outcome.calls) <= (1 if one_at_most or named else MAX_CALLS)
        for name, arguments in outcome.calls:
            assert name == (named or name)
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_several_calls_are_allowed_unless_one_at_most_is_asked(model: Model) -> None:
    one, two = call("ping", {}), f'[{call("ping", {})}, {call("get_weather", {"city": "x"})}]'
    assert model.takes(forced(), two)
    assert model.takes(forced(), f"[{one}]")
    assert not model.takes(forced(one_at_most=True), two)
    assert model.takes(forced(one_at_most=True), one)
    assert not model.takes(forced(), f"[{', '.join([one] * (MAX_CALLS + 1))}]")
    assert model.takes(forced(), f"[{', '.join([one] * MAX_CALLS)}]")


@pytest.mark.parametrize("text", [
    "", "hello", "[]", call("nope", {}), call("ping", {"a": 1}), call("get_weather", {}),
    call("get_weather", {"city": "x", "days": 15}), call("get_weather", {"city": "x", "other": 1}),
    call("a.b-c", {"root": {"next": {"value": 1}}}), call("ping", {}) + " and more"])
def test_nothing_but_a_valid_call_is_allowed(model: Model, text: str) -> None:
    assert not model.takes(forced(one_at_most=True), text)


def test_a_named_function_is_called_once_and_no_other(model: Model) -> None:
    assert model.takes(forced("ping"), call("ping", {}))
    assert not model.takes(forced("ping"), call("get_weather", {"city": "x"}))
    assert not model.takes(forced("ping"), f"[{call('ping', {})}]")


def test_white_space_cannot_go_on_and_on(model: Model) -> None:
    assert not model.takes(forced("get_weather"), '{"name": "get_weather", "arguments": { "city": "x"}}')
    assert not model.takes(forced("get_weather"), '{"name": "get_weather", "arguments": {"city":  "x"}}')


@pytest.mark.parametrize(("parameters", "arguments", "is_allowed"), [
    ({"type": "object"}, {"any": 1}, True),
    ({"type": "object", "properties": {}}, {"any": 1}, False),
    ({"properties": {"a": {}}}, {"a": [1]}, True),
    ({"properties": {"a": {}}}, 1, False),
    ({"properties": {"a": {}}, "additionalProperties": True}, {"b": 1}, True),
    ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, {"b": "x"}, False),
    ({"$ref": "#/$defs/o", "$defs": {"o": {"type": "object", "properties": {"a": {}}}}}, {"a": 1}, True),
    ({"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "null"}]}, {"a": 1},
     True),
    ({"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "null"}]}, None,
     False),
])
def test_arguments_are_an_object_of_the_names_that_the_schema_lists(
    model: Model, parameters: dict[str, Any], arguments: Any, is_allowed: bool
) -> None:
    grammar = tool_grammar("none", [ToolSpec("f", parameters)], named="f", one_at_most=True).grammar
    assert model.takes(grammar, call("f", arguments)) is is_allowed


def test_a_model_that_says_parameters_goes_on_saying_so(model: Model) -> None:
    text = '{"name": "ping", "parameters": {}}'
    assert model.takes(forced("ping", parser="llama3_json"), text)
    assert read(parser_of(FORCED_PARSER, NAMES), [text]) == Outcome("", "", [("ping", "{}")])


def test_the_real_tokenizer_takes_the_grammar_too(smollm2: Path) -> None:
    grammar = tool_grammar("none", [*TOOLS, ToolSpec("größe")], named=None, one_at_most=False).grammar
    state = GrammarCompiler(smollm2, 49152, frozenset((END,))).compile(grammar)
    text = f"[{call('get_weather', {'city': 'Zürich', 'days': 3})}, {call('größe', {})}]"
    state.accept([*Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids, END])
    assert state.is_finished


def test_many_tools_with_references_of_their_own_are_one_grammar(smollm2: Path) -> None:
    tools = [ToolSpec(f"tool_{i}", TREE) for i in range(128)]
    grammar = tool_grammar("none", tools, named=None, one_at_most=False).grammar
    state = GrammarCompiler(smollm2, 49152, frozenset((END,))).compile(grammar)
    text = f"[{call('tool_127', {'root': {'value': 1, 'next': {'value': 2}}})}]"
    state.accept([*Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids, END])
    assert state.is_finished


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(("tools", "named", "param", "reason"), [
    (TOOLS, "nope", "tool_choice", "no tool is named 'nope'"),
    ([], None, "tool_choice", "no tools to choose from"),
    ([ToolSpec("f"), ToolSpec("g", {"type": "string"}, "tools.1.function.parameters")], None,
     "tools.1.function.parameters", "schema of an object"),
    ([ToolSpec("f", _nested(100), "tools.0.function.parameters")], None,
     "tools.0.function.parameters", "nested deeper than 64 schemas"),
    ([ToolSpec("f", {"description": "x" * MAX_GRAMMAR_BYTES})], None, "tools", f"at most {MAX_GRAMMAR_BYTES} bytes"),
])
def test_tools_that_cannot_be_enforced_are_refused(
    tools: list[ToolSpec], named: str | None, param: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tool_grammar("none", tools, named=named, one_at_most=False)
    assert caught.value.param == param


PERSON = {
    "type": "object", "properties": {"name": {"type": "string"}, "boss": {"$ref": "#"}}, "required": ["name"],
    "additionalProperties": False}
ANSWER = Answer(PERSON, "response_format.json_schema.schema")


@pytest.mark.parametrize(("text", "outcome"), [
    ('{"name": "Ann", "boss": {"name": "Bo"}}', ...),
    ('{"name": "ping", "boss": {"name": "Bo"}}', ...),
    ('{"name": "get_weather", "arguments": {"city": "x"}}', Outcome(calls=[("get_weather", '{"city": "x"}')])),
    ('[{"name": "ping", "arguments": {}}]', Outcome(calls=[("ping", "{}")])),
    ('{"name": "ping"}', Outcome(calls=[("ping", "{}")])),  # what reads as a call is one
])
def test_an_answer_of_a_schema_may_be_written_in_place_of_calls(model: Model, text: str, outcome: Any) -> None:
    grammar = tool_grammar("none", TOOLS, named=None, one_at_most=False, answer=ANSWER).grammar
    assert model.takes(grammar, text)
    for pieces in ([text], list(text)):
        assert read(parser_of(FORCED_PARSER, NAMES), pieces) == (Outcome(text) if outcome is ... else outcome)


def test_beside_an_answer_nothing_else_is_allowed(model: Model) -> None:
    for one_at_most in (False, True):
        grammar = tool_grammar("none", TOOLS, named=None, one_at_most=one_at_most, answer=ANSWER).grammar
        assert model.takes(grammar, call("ping", {}))
        assert model.takes(grammar, f"[{call('ping', {})}]") is not one_at_most
        for text in ("hello", "{}", '{"name": 1}', call("nope", {}), '{"name": "Ann", "boss": {}}', "[]"):
            assert not model.takes(grammar, text)


def test_only_a_strict_tool_is_refused_for_what_cannot_be_enforced(model: Model) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    grammars = [tool_grammar("none", [ToolSpec("f", parameters, is_strict=is_strict)], named="f", one_at_most=True)
                for is_strict in (False, True)]
    assert model.takes(grammars[0].grammar, call("f", {"a": [1, 1]}))
    assert not model.takes(grammars[0].grammar, call("f", {"a": 1}))
    with pytest.raises(UnsupportedValue, match="uniqueItems") as caught:
        model.takes(grammars[1].grammar, "")
    assert next(iter(grammars[1].places)) in caught.value.message
