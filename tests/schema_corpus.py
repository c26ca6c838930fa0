"""Two hundred JSON schemas of many kinds, made from a fixed seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = ("^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(foo|bar)+$", "[A-Z][0-9]", r"^\w+@\w+\.com$", "^$|^x",
            "^[^\"\\\\]{1,4}$")
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v"], "additionalProperties": False}
WORDS = ("id", "name", "kind", "größe", "a b", "quote\"d", "日本", "first_name_of_the_customer", "x", "items")


def schemas(count: int = 200, seed: int = 7) -> list[Schema]:
    """Every kind at the root some times, and then nested at random. Some have no valid value or are not supported."""
    rng = random.Random(seed)
    roots = (*KINDS, _not_supported)
    return [roots[i % len(roots)](rng, 2) | {"$defs": {"leaf": _any(rng, 0), "node": NODE}} for i in range(count)]


def _any(rng: random.Random, depth: int) -> Schema:
    return rng.choice(KINDS if depth > 0 else LEAVES)(rng, depth - 1)


def _integer(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    high = low + rng.choice((0, 1, 7, 5000))
    return rng.choice((
        {"type": "integer", "minimum": low, "maximum": high}, {"type": "integer", "exclusiveMinimum": low},
        {"type": "integer", "multipleOf": rng.randint(2, 12)},
        {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9, "multipleOf": 3}))


def _number(rng: random.Random, _depth: int) -> Schema:
    low = round(rng.uniform(-50, 50), 2)
    return rng.choice((
        {"type": "number", "minimum": low}, {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 0.5},
        {"type": "number", "maximum": low}, {"type": "number", "minimum": 0, "maximum": 1}))


def _string(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(0, 6)
    return rng.choice((
        {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)}, {"type": "string", "maxLength": 3},
        {"type": "string", "minLength": 2, "maxLength": 9, "pattern": "^[a-f]*$"}))


def _pattern(rng: random.Random, _depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _format(rng: random.Random, _depth: int) -> Schema:
    return {"type": "string", "format": rng.choice(FORMATS)}


def _enum(rng: random.Random, _depth: int) -> Schema:
    values: list[Any] = ["a", "a b", "ab", 1, 10, -3, 1.5, True, None, "é\n", {"k": [1, {}]}, [], ""]
    return rng.choice(({"enum": rng.sample(values, rng.randint(1, 6))}, {"const": rng.choice(values)}))


def _type(rng: random.Random, _depth: int) -> Schema:
    return {"type": rng.choice(("null", "boolean", "integer", ["string", "null"], ["boolean", "number"]))}


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 3)
    return rng.choice((
        {"type": "array", "items": _any(rng, depth), "minItems": low, "maxItems": low + rng.randint(0, 3)},
        {"type": "array", "prefixItems": [_any(rng, depth), _any(rng, depth)], "items": False, "minItems": low % 3},
        {"type": "array", "prefixItems": [_any(rng, depth)], "items": _any(rng, depth), "maxItems": 3}))


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 5))
    return {"type": "object", "properties": {name: _any(rng, depth) for name in names},
            "required": rng.sample(names, rng.randint(0, len(names))), "additionalProperties": False}


def _map(rng: random.Random, depth: int) -> Schema:
    return rng.choice((
        {"type": "object", "additionalProperties": _any(rng, depth), "maxProperties": 3},
        {"type": "object", "patternProperties": {"^n_[a-z]{1,3}$": _any(rng, depth)}, "additionalProperties": False},
        {"type": "object", "properties": {"a": _any(rng, depth)}, "required": ["a", "b"], "minProperties": 2,
         "additionalProperties": _any(rng, depth), "maxProperties": 3}))


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {rng.choice(("anyOf", "anyOf", "oneOf")): [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _one_of(rng: random.Random, depth: int) -> Schema:
    return {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "value": _any(rng, depth)},
         "required": ["kind", "value"], "additionalProperties": False} for kind in ("circle", "square")]}


def _all_of(rng: random.Random, _depth: int) -> Schema:
    low = rng.randint(0, 50)
    return rng.choice((
        {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 20}]},
        {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}, {"pattern": "^[ab]*$"}]},
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
         "maxProperties": 2}))


def _ref(rng: random.Random, _depth: int) -> Schema:
    return rng.choice((
        {"$ref": "#/$defs/leaf"}, {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
        {"$ref": "#/$defs/node"}, {"type": "object", "properties": {"b": {"$ref": "#/$defs/leaf"}}, "required": ["b"],
                                   "additionalProperties": False}))


def _not_supported(rng: random.Random, depth: int) -> Schema:
    return rng.choice((
        {"not": {"type": "string"}}, {"type": "array", "items": _any(rng, depth), "uniqueItems": True},
        {"type": "object", "propertyNames": {"maxLength": 3}}, {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"type": "string", "format": "idn-email"}, {"type": "array", "contains": {"type": "integer"}},
        {"type": "object", "minProperties": 4}, {"type": "string", "minLength": 4, "maxLength": 2}))


LEAVES: tuple[Callable[[random.Random, int], Schema], ...] = (
    _integer, _number, _string, _pattern, _format, _enum, _type)
KINDS = (*LEAVES, _array, _object, _map, _any_of, _one_of, _all_of, _ref, _object)
