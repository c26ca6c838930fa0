"""Which keywords of JSON Schema are enforced, which ask for nothing, and what is left when one does not insist.

All functions take one schema object without those inside it. Torch-free.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from common.errors import InvalidRequest
from engine.grammar.regex_check import check_regex

ENFORCED = frozenset((
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems", "additionalItems", "minItems",
    "maxItems", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf"))
# "discriminator", "example", "externalDocs" and "xml" are OpenAPI's.
ANNOTATIONS = frozenset((
    "$schema", "$id", "id", "$anchor", "$defs", "definitions", "$comment", "title", "description", "default",
    "examples", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "discriminator",
    "example", "externalDocs", "xml"))
# Values that ask for nothing, of keywords that are not enforced.
SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {"type": "string"}), "uniqueItems": (False,), "nullable": (False,),
    "unevaluatedProperties": (True,), "unevaluatedItems": (True,)}
ENFORCED_FORMATS = frozenset((
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# What else JSON Schema defines is refused; names that it does not know of (OpenAPI's, for one) are annotations.
UNENFORCED_FORMATS = frozenset((
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer",
    "relative-json-pointer", "regex"))


def is_known(keyword: str) -> bool:
    is_extension = keyword.startswith("x-") and keyword != "x-guidance"
    return keyword in ENFORCED or keyword in ANNOTATIONS or is_extension


def asks_for_more_properties(node: dict[str, Any]) -> bool:
    """Than can be counted: keys that are not named in `properties` may come twice."""
    at_least = node.get("minProperties", 0)
    required = node.get("required")
    num_required = len(set(map(str, required))) if isinstance(required, list) else 0
    return isinstance(at_least, int | float) and at_least > max(1, num_required)


def has_unenforced_format(node: dict[str, Any]) -> bool:
    return isinstance(node.get("format"), str) and node["format"] in UNENFORCED_FORMATS


def take_out_silent(node: dict[str, Any]) -> None:
    for keyword, values in SAYS_NOTHING.items():
        if keyword in node and any(node[keyword] == value and type(node[keyword]) is type(value) for value in values):
            del node[keyword]
    name = node.get("format")
    if isinstance(name, str) and name not in ENFORCED_FORMATS and name not in UNENFORCED_FORMATS:
        del node["format"]


def take_out_unenforced(node: dict[str, Any]) -> None:
    """What is left allows all that was allowed."""
    if node.get("nullable") is True and isinstance(node.get("type"), str):
        node["type"] = sorted({node["type"], "null"})
    for keyword in [keyword for keyword in node if not is_known(keyword)]:
        del node[keyword]
    if has_unenforced_format(node):
        del node["format"]
    if asks_for_more_properties(node):
        del node["minProperties"]
    if "pattern" in node and not _is_enforceable(node["pattern"]):
        del node["pattern"]
    patterns = node.get("patternProperties")
    if isinstance(patterns, dict) and not all(map(_is_enforceable, patterns)):
        del node["patternProperties"]
        node.pop("additionalProperties", None)  # it was of what no pattern matches
    if "oneOf" in node and "anyOf" not in node:  # options may overlap now
        node["anyOf"] = node.pop("oneOf")


def _is_enforceable(pattern: Any) -> bool:
    if not isinstance(pattern, str):
        return True  # refused as what it is
    try:
        check_regex(pattern, "pattern")
    except InvalidRequest:
        return False
    source = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not LLMatcher.validate_grammar(source)
