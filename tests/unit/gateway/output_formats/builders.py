"""Calls as models of each family write them, and outputs read in any pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from gateway.output_formats import hermes, llama3_json, mistral, pythonic
from gateway.output_formats.call_parser import CallFormat, CallParser
from gateway.output_formats.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR, read_deepseek
from gateway.output_formats.json_calls import read_json
from gateway.parsed import (
    ContentDelta,
    OutputParser,
    ParsedDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)

Call = tuple[str, dict[str, Any]]
# How fast examples come says something about the machine, and nothing about the parsers.
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NAMES = ("f", "get_weather", "a.b-c", "function")
READERS: dict[str, CallFormat] = {
    "hermes": hermes.read_hermes, "llama3_json": llama3_json.read_llama3_json, "mistral": mistral.read_mistral,
    "pythonic": pythonic.read_pythonic, "deepseek": read_deepseek, "json": read_json}


@dataclass
class Outcome:
    """Deltas joined. `calls`: name and text of the arguments, in order."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def joined(deltas: Sequence[ParsedDelta]) -> Outcome:
    """Checks that calls are counted from 0 and that arguments are those of the last one."""
    out = Outcome()
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                assert text
                out.content += text
            case ReasoningDelta(text):
                assert text
                out.reasoning += text
            case ToolCallStart(index, name):
                assert index == len(out.calls)
                out.calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert text
                assert index == len(out.calls) - 1
                out.calls[-1] = (out.calls[-1][0], out.calls[-1][1] + text)
    return out


def parser_of(family: str, names: Sequence[str] = NAMES, *, one_at_most: bool = False) -> CallParser:
    return CallParser(READERS[family], names, one_at_most=one_at_most)


def read(parser: OutputParser, pieces: Sequence[str]) -> Outcome:
    return joined([*(delta for piece in pieces for delta in parser.push(piece)), *parser.finish()])


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(ends)]


PLACES = st.lists(st.integers(0, 10_000), max_size=12)
_NASTY = (
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", CALLS,
    CALLS_END, CALL_END, SEPARATOR, "```", "[f(a=1)]", "</think>", '"', "'", "'''", "\\", "\\u00e9", "{", "}", "[", "]",
    "\n", "\t", "\x01", "é", "😀", "\u2028", ", ", ": ", "=", ")", " ", "",
)
_ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
TEXTS = st.lists(st.sampled_from(_NASTY) | _ANY, max_size=5).map("".join)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8)
_KEYWORDS = st.sampled_from(("a", "b", "city", "größe", "_x1", "arguments", "name"))
CALL_LISTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(_KEYWORDS, VALUES, max_size=3)), min_size=1, max_size=3)
STYLES: st.SearchStrategy[dict[str, Any]] = st.sampled_from((
    {}, {"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False, "indent": "\t"}))


def _object(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


def _hermes(calls: list[tuple[str, str]]) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _llama3(calls: list[tuple[str, str]]) -> str:
    return "<|python_tag|>" + "; ".join(_object(*call, "parameters") for call in calls)


def _untagged_llama3(calls: list[tuple[str, str]]) -> str:
    return _llama3(calls).removeprefix("<|python_tag|>")


def _mistral_list(calls: list[tuple[str, str]]) -> str:
    return f"[TOOL_CALLS] [{', '.join(_object(*call) for call in calls)}]"


def _mistral_named(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def _mistral_ids(calls: list[tuple[str, str]]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS] {arguments}" for name, arguments in calls)


def _deepseek_v3(calls: list[tuple[str, str]]) -> str:
    fenced = [f"{name}\n```json\n{arguments}\n```" for name, arguments in calls]
    return CALLS + "\n".join(f"{CALL}function{SEPARATOR}{call}{CALL_END}" for call in fenced) + CALLS_END


def _deepseek_v31(calls: list[tuple[str, str]]) -> str:
    return CALLS + "".join(f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}" for name, arguments in calls) + CALLS_END


def _json(calls: list[tuple[str, str]]) -> str:
    return f"[{', '.join(_object(*call) for call in calls)}]"


# Spelling: the family that reads it, its writer, and whether content may come before it and after it.
JSON_SPELLINGS: dict[str, tuple[str, Callable[[list[tuple[str, str]]], str], bool, bool]] = {
    "hermes": ("hermes", _hermes, True, True),
    "llama3": ("llama3_json", _llama3, True, True),
    "llama3 without its tag": ("llama3_json", _untagged_llama3, False, True),
    "mistral list": ("mistral", _mistral_list, True, True),
    "mistral named": ("mistral", _mistral_named, True, True),
    "mistral with ids": ("mistral", _mistral_ids, True, True),
    "deepseek v3": ("deepseek", _deepseek_v3, True, True),
    "deepseek v3.1": ("deepseek", _deepseek_v31, True, True),
    "json": ("json", _json, False, True),
}


def in_python(calls: Sequence[Call]) -> str:
    return f"[{', '.join(f'{name}({_keywords(arguments)})' for name, arguments in calls)}]"


def _keywords(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{keyword}={value!r}" for keyword, value in arguments.items())
