"""The grammar of an output that has to be tool calls: tool_choice `required`, or a named function.

It is JSON for every model, whatever format the model itself writes calls in: markers that are special tokens have no
text, so that no grammar of texts can ask for them, and models without any format can be made to call, too. Only the
key of the arguments is the model's own. One call is an object, several are an array of them.

    {"name": "f", "arguments": {…}}        [{"name": "f", "arguments": {…}}, {"name": "g", "arguments": {…}}]

The tools' schemas become parts of one schema, and what they refer to in themselves moves along. Of a tool that is not
`strict`, what cannot be enforced is left out by the compiler.

Where an answer of a certain schema is asked beside tools that may be called, the output is either, and one call needs
no array. What reads as a call is one: a schema that allows objects like calls (`name` is that of a tool, `arguments`,
if there are any, an object) does not get such values as content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from common.errors import InvalidRequest
from common.grammar import LENIENT, Grammar, GrammarKind

FORCED_PARSER: Final = "json"  # reads what the grammar lets through
MAX_CALLS: Final = 16  # of one output; a model that repeats itself ends there
MAX_DEPTH: Final = 64  # of a tool's nested schemas

_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_SAYS_MORE: Final = frozenset({
    "additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"})
_OF_A_WHOLE_SCHEMA: Final = frozenset({"$schema", "$id", "id"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SINGLE: Final = frozenset({"additionalItems", "additionalProperties", "items"})


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A function that may be called. `parameters`: the schema of its arguments; None or empty: it takes none.

    `param`: the field that they were sent in. `is_strict`: what cannot be enforced of them is refused.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    param: str = "tools"
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What may be written in place of calls. `param`: the field that its schema was sent in."""

    schema: Mapping[str, Any]
    param: str


@dataclass(frozen=True, slots=True)
class ToolGrammar:
    """`places`: path of a part of the grammar's schema → the field that it was sent in."""

    grammar: Grammar
    places: Mapping[str, str] = field(default_factory=dict)


def tool_grammar(
    parser: str, tools: Sequence[ToolSpec], *, named: str | None, one_at_most: bool, answer: Answer | None = None,
) -> ToolGrammar:
    """At least one call of `tools`, or `answer`; of `named`, exactly one. `parser`: of the model's own format.

    Raises `InvalidRequest` for a name that is not among the tools, and for schemas that are too long, too deep or not
    of an object. What else a schema may have wrong, its compiler says.
    """
    allowed = [tool for tool in tools if named in (None, tool.name)]
    if not allowed:
        what = "no tools to choose from" if named is None else f"no tool is named {named[:64]!r}"
        raise InvalidRequest(f"tool_choice: {what}", param="tool_choice")
    key = "parameters" if parser == "llama3_json" else "arguments"
    is_single = named is not None or one_at_most
    place = "/anyOf/1" if answer is not None else "" if is_single else "/items"
    places = {f"{place}/anyOf/{nth}/properties/{key}": tool for nth, tool in enumerate(allowed)}
    call = {"anyOf": [_call_schema(tool, key, at) for at, tool in places.items()]}
    sent_in = {at: tool.param for at, tool in places.items()}
    if answer is not None:
        sent_in["/anyOf/0"] = answer.param
        schema: Mapping[str, Any] = {"anyOf": [_moved(answer.schema, "/anyOf/0", answer.param, 1), call]}
        schema["anyOf"].extend([] if is_single else [_several({"$ref": f"#{place}"})])
    else:
        schema = call if is_single else _several(call)
    try:
        return ToolGrammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False)), sent_in)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"tools: their schemas are too long to be enforced: {error.message.removeprefix('grammar: ')}",
            param="tools") from None


def _several(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_CALLS}


def _call_schema(tool: ToolSpec, key: str, place: str) -> dict[str, Any]:
    """`place`: JSON pointer to the arguments' schema."""
    properties = {"name": {"const": tool.name}, key: _arguments_schema(tool, place)}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _arguments_schema(tool: ToolSpec, place: str) -> Mapping[str, Any]:
    """Arguments are an object, and of names that the schema lists, unless it says more about them than that."""
    if not tool.parameters:
        return _NO_ARGUMENTS
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{tool.param}: must be the schema of an object", param=tool.param)
    schema = {**_moved(tool.parameters, place, tool.param, 1), "type": "object", LENIENT: not tool.is_strict}
    if "properties" in schema and not _SAYS_MORE & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _moved(schema: Any, place: str, param: str, depth: int) -> Any:
    """The schema with its references to itself as they have to be at `place`; what is no schema stays as it is."""
    if not isinstance(schema, Mapping):
        return schema
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param}: is nested deeper than {MAX_DEPTH} schemas", param=param)
    moved: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[keyword] = f"#{place}{value[1:]}"
        elif keyword in _MAPS and isinstance(value, Mapping):
            moved[keyword] = {name: _moved(child, place, param, depth + 1) for name, child in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            moved[keyword] = [_moved(child, place, param, depth + 1) for child in value]
        elif keyword in _SINGLE:
            moved[keyword] = _moved(value, place, param, depth + 1)
        elif keyword not in _OF_A_WHOLE_SCHEMA:
            moved[keyword] = value
    return moved
