"""What of JSON Schema is enforced, and how large a schema may be. Torch-free.

llguidance refuses the keywords that it knows of and does not implement, and ignores all others. Here any keyword that
is neither enforced nor an annotation is refused by name, so that no part of a schema is silently left out. Keywords
with a value that every JSON value satisfies are taken out first. A part of a schema that says `LENIENT` is the
exception: what of it cannot be enforced is taken out, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.errors import InvalidRequest, UnsupportedValue
from common.grammar import LENIENT
from engine.grammar.llguidance_state import refusal
from engine.grammar.regex_check import check_regex
from engine.grammar.schema_keywords import (
    asks_for_more_properties,
    has_unenforced_format,
    is_known,
    take_out_silent,
    take_out_unenforced,
)

MAX_DEPTH = 64  # of nested schemas
MAX_LEVELS = 4096  # depth, times one more than the number of different $refs: how deep the compiler may have to go
MAX_PROPERTIES = 1000  # of one object
MAX_ENUM_VALUES = 20_000  # of the whole schema

TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("additionalItems", "additionalProperties", "items")


def check_schema(schema: Any) -> None:
    """Raise `InvalidRequest` for a parsed schema beyond a limit, `UnsupportedValue` for a keyword, naming its path.

    Takes out of it, in place, what asks for nothing or, in a lenient part, cannot be enforced.
    """
    refs: set[str] = set()
    deepest = num_enum_values = 0
    open_schemas: list[tuple[Any, str, int, bool]] = [(schema, "", 1, False)]
    while open_schemas:
        node, path, depth, is_lenient = open_schemas.pop()
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            raise refusal(f"schema is nested deeper than {MAX_DEPTH} schemas")
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise refusal(f"schema at {path or 'the root'} must be an object or a boolean, got {_kind(node)}")
        take_out_silent(node)
        if is_lenient := is_lenient or node.get(LENIENT) is True:
            take_out_unenforced(node)
        _check_node(node, path)
        refs.add(node.get("$ref", ""))
        num_enum_values += len(node.get("enum", ()))
        open_schemas += (
            (child, f"{path}/{name}", depth + 1, is_lenient) for name, child in _children(node, path))
    if num_enum_values > MAX_ENUM_VALUES:
        raise refusal(f"schema has {num_enum_values} enum values, the limit is {MAX_ENUM_VALUES}")
    if deepest * len(refs) > MAX_LEVELS:
        raise refusal(
            f"schema is too deep: {len(refs)} different $refs and depth {deepest}, the product's limit is {MAX_LEVELS}")


def _check_node(node: dict[str, Any], path: str) -> None:
    for keyword in node:
        if not is_known(keyword):
            raise _unsupported(keyword, path, "is not supported")
    if has_unenforced_format(node):
        raise _unsupported("format", path, f"is not supported with {node['format']!r}")
    names = node.get("type", [])
    for name in names if isinstance(names, list) else [names]:
        if not isinstance(name, str) or name not in TYPES:
            raise refusal(f"schema: unknown type {str(name)[:40]!r} at {path}/type")
    for keyword, kind in (("enum", list), ("required", list), ("$ref", str), ("pattern", str), ("properties", dict)):
        if keyword in node and not isinstance(node[keyword], kind):
            raise refusal(f"schema: {path}/{keyword} must be {_kind(kind())}, got {_kind(node[keyword])}")
    if len(node.get("properties", ())) > MAX_PROPERTIES:
        raise refusal(
            f"schema: {path}/properties has {len(node['properties'])} entries, the limit is {MAX_PROPERTIES}")
    _check_enforceable(node, path)


def _check_enforceable(node: dict[str, Any], path: str) -> None:
    """Keywords that llguidance enforces only in part."""
    if asks_for_more_properties(node):
        raise _unsupported("minProperties", path, "above 1 is only supported up to the number of required properties")
    if "pattern" in node:
        check_regex(node["pattern"], f"schema: {path}/pattern")
    patterns = node.get("patternProperties", {})
    for pattern in patterns if isinstance(patterns, dict) else ():
        check_regex(pattern, f"schema: {path}/patternProperties")


def _children(node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for keyword in _LISTS:
        children = node.get(keyword, [])
        if not isinstance(children, list):
            raise refusal(f"schema: {path}/{keyword} must be an array, got {_kind(children)}")
        yield from ((f"{keyword}/{i}", child) for i, child in enumerate(children))
    for keyword in _MAPS:
        named = node.get(keyword, {})
        if not isinstance(named, dict):
            raise refusal(f"schema: {path}/{keyword} must be an object, got {_kind(named)}")
        yield from ((f"{keyword}/{name}", child) for name, child in named.items())
    for keyword in _SINGLE:
        child = node.get(keyword, True)
        if keyword == "items" and isinstance(child, list):  # before draft 2020-12
            yield from ((f"items/{i}", item) for i, item in enumerate(child))
        else:
            yield keyword, child


def _unsupported(keyword: str, path: str, what: str) -> InvalidRequest:
    return UnsupportedValue(
        f"grammar: schema: keyword {keyword[:60]!r} at {path or 'the root'} {what}", param="grammar")


def _kind(value: object) -> str:
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "a number")
