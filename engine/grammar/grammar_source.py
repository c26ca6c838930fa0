"""A checked `Grammar` in the form that llguidance compiles. Torch-free.

JSON is written as `json.dumps` writes it: one space after each comma and colon, no other white space. This is what
models have seen most of, and as it leaves no choice between keys and values, the forced runs are long.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from common.grammar import Grammar, GrammarKind
from engine.grammar.llguidance_state import reason_of, refusal
from engine.grammar.regex_check import check_regex
from engine.grammar.schema_check import check_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CHOICES = 1000
MAX_LARK_LEVELS = 4096  # rules and open brackets: how deep the compiler may have to go

_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False,
    "coerce_one_of": False}
_RULE = re.compile(r"^[ \t]*[?!]?\w+.*?:", re.MULTILINE)
_LARK_REGEX = re.compile(r"/((?:\\.|[^/\\\n])+)/")


def source_of(grammar: Grammar) -> str:
    """What `LLMatcher` takes. Raises `InvalidRequest` with the reason."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json_source(grammar.text)
        case GrammarKind.REGEX:
            check_regex(grammar.text, "regex")
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return _lark_source(grammar.text)
        case GrammarKind.CHOICE:
            return _choice_source(grammar.text)


def _json_source(text: str) -> str:
    schema = _parsed(text, "schema")
    if schema is False:
        raise refusal("schema is false: no value is valid")
    check_schema(schema)
    try:
        return LLMatcher.grammar_from_json_schema(
            json.dumps({} if schema is True else schema), overrides=_JSON_OPTIONS)
    except ValueError as exc:
        raise refusal(f"schema: {reason_of(str(exc))}") from exc


def _lark_source(text: str) -> str:
    num_levels = len(_RULE.findall(text)) + text.count("(") + text.count("[")
    if num_levels > MAX_LARK_LEVELS:
        raise refusal(f"lark has {num_levels} rules and open brackets, the limit is {MAX_LARK_LEVELS}")
    for regex in _LARK_REGEX.finditer(text):
        check_regex(regex[1], "lark: regex")
    checked: list[str] = []
    end = 0
    for place in re.finditer(r"%json\s*", text):
        if place.start() < end:  # within a schema
            continue
        try:
            schema, schema_end = json.JSONDecoder().raw_decode(text, place.end())
        except (ValueError, RecursionError) as exc:
            raise refusal(f"lark: the schema after %json is not JSON: {exc}") from exc
        sent = json.dumps(schema)
        check_schema(schema)
        if (kept := json.dumps(schema)) != sent:
            checked += (text[end : place.end()], kept)
            end = schema_end
    return LLMatcher.grammar_from_lark("".join((*checked, text[end:])))


def _choice_source(text: str) -> str:
    choices = _parsed(text, "choice")
    if not (isinstance(choices, list) and all(isinstance(choice, str) and choice for choice in choices)):
        raise refusal("choice must be a JSON array of strings that are not empty")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise refusal(f"choice must have 1 to {MAX_CHOICES} strings, got {len(choices)}")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, dict.fromkeys(choices))))


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError as exc:
        raise refusal(f"{what} is nested too deeply") from exc
    except ValueError as exc:
        raise refusal(f"{what} is not JSON: {exc}") from exc


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
