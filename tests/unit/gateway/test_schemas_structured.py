"""What shape of output each dialect asks for, as the one grammar that a worker gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import UnsupportedValue
from common.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarKind
from gateway.order import Order
from tests.unit.gateway.bodies import chat, complete, refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "answer", "schema": SCHEMA}
ANY_OBJECT = {"type": "object"}
JSON_SCHEMA, REGEX, LARK, CHOICE = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK, GrammarKind.CHOICE
EBNF = 'root ::= "yes" | "no"'

# What is sent, the kind of the grammar, its text (as JSON where it is JSON), and the field that it came in.
ASKED: list[tuple[dict[str, Any], GrammarKind, Any, str]] = [
    ({"response_format": {"type": "json_object"}}, JSON_SCHEMA, ANY_OBJECT, "response_format"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON_SCHEMA, SCHEMA, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "name": "Answer[int] " * 20}}}, JSON_SCHEMA,
     SCHEMA, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, JSON_SCHEMA, SCHEMA,
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": False, "description": "d"}}},
     JSON_SCHEMA, SCHEMA, "response_format.json_schema.schema"),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JSON_SCHEMA, SCHEMA, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}}}, JSON_SCHEMA, {}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": True}}, JSON_SCHEMA, ANY_OBJECT, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a+", "json_object": False, "json": None}}, REGEX, "a+",
     "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", "ü"]}}, CHOICE, ["a", "ü"], "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: /a/", "disable_any_whitespace": True}}, LARK, "start: /a/",
     "structured_outputs.grammar"),
    ({"structured_outputs": {"grammar": EBNF, "disable_additional_properties": False}}, LARK, ...,
     "structured_outputs.grammar"),
    ({"regex": "[0-9]+"}, REGEX, "[0-9]+", "regex"),
    ({"ebnf": EBNF}, LARK, ..., "ebnf"),
    ({"json_schema": json.dumps(SCHEMA)}, JSON_SCHEMA, SCHEMA, "json_schema"),
    ({"guided_json": SCHEMA}, JSON_SCHEMA, SCHEMA, "guided_json"),
    ({"guided_regex": "a"}, REGEX, "a", "guided_regex"),
    ({"guided_choice": ["a"]}, CHOICE, ["a"], "guided_choice"),
    ({"guided_grammar": "start: /a/"}, LARK, "start: /a/", "guided_grammar"),
    ({"guided_json_object": True}, JSON_SCHEMA, ANY_OBJECT, "guided_json_object"),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
     "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": SCHEMA}}},
     "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a" * 257, "schema": SCHEMA}}},
     "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": True}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json_object"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "true"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "root ::= [a-"}}, "structured_outputs.grammar"),
    ({"ebnf": "root ::= other"}, "ebnf"),
    ({"json_schema": "nope"}, "json_schema"),
    ({"guided_json": []}, "guided_json"),
    ({"regex": "a", "ebnf": EBNF}, "ebnf"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
]
NOT_OFFERED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties"),
    ({"structural_tag": "{}"}, "structural_tag"), ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
]
CALLS = pytest.mark.parametrize("call", [chat, complete])


@CALLS
@pytest.mark.parametrize(("sent", "kind", "text", "param"), ASKED, ids=lambda value: str(value)[:40])
def test_every_dialect_becomes_one_grammar(
    call: Callable[..., Order], sent: dict[str, Any], kind: GrammarKind, text: Any, param: str
) -> None:
    order = call(**sent)
    assert order.grammar is not None
    assert (order.grammar.kind, order.grammar_param) == (kind, param)
    if text is not ...:
        is_json = kind in (JSON_SCHEMA, CHOICE)
        assert (json.loads(order.grammar.text) if is_json else order.grammar.text) == text
    assert order.sampling_params(4).grammar == order.grammar


@CALLS
@pytest.mark.parametrize(("sent", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_shape_or_a_second_constraint_is_refused_by_the_clients_own_field(
    call: Callable[..., Order], sent: dict[str, Any], param: str
) -> None:
    refusal = refused(call, **sent)
    assert refusal.param == param
    assert len(refusal.message) < 1000


@CALLS
@pytest.mark.parametrize(("sent", "param"), NOT_OFFERED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_enforced_is_refused_by_name(
    call: Callable[..., Order], sent: dict[str, Any], param: str
) -> None:
    refusal = refused(call, **sent)
    assert (type(refusal), refusal.param) == (UnsupportedValue, param)


def test_a_second_constraint_is_told_with_both_names() -> None:
    message = refused(chat, regex="a", guided_choice=["b"]).message
    assert "regex" in message
    assert "guided_choice" in message


@CALLS
def test_plain_text_has_no_grammar(call: Callable[..., Order]) -> None:
    for sent in ({}, {"response_format": {"type": "text"}}, {"guided_json_object": False},
                 {"structured_outputs": None}):
        assert call(**sent).grammar is None


def test_a_schema_keeps_the_order_of_its_properties_and_its_exact_numbers() -> None:
    schema = {"type": "object", "properties": {"z": {"const": 2**70}, "a": {"const": "\u00e9\n"}}}
    grammar = chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}).grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema
    assert grammar.text.index('"z"') < grammar.text.index('"a"')


def test_a_constrained_output_is_not_read_for_reasoning() -> None:
    assert chat(regex="a").reasoning_parser == ""


def test_a_grammar_is_the_same_for_all_prompts_of_a_batch() -> None:
    assert complete(regex="a").grammar == Grammar(REGEX, "a")
