"""What a client asks of the shape of its output, as one grammar and the field that it came in.

Every dialect means the same: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`,
SGLang's `regex`, `ebnf` and `json_schema`. Here is checked what a spelling can have wrong; whether a schema, a regex or
a grammar makes sense, a worker says before the first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from common.errors import InvalidRequest, UnsupportedValue
from common.grammar import Grammar, GrammarKind
from gateway.ebnf import is_ebnf, lark_of
from gateway.field_types import Texts

ANY_OBJECT = '{"type": "object"}'
_DEPRECATED: JsonDict = {"deprecated": True}
_Choices = Annotated[Texts, Field(max_length=1000)]  # what the engine takes


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1, max_length=256, description="a label")
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="the output is a value that it allows")
    strict: bool | None = Field(None, description="of no effect: a schema is always enforced, or refused")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str = Field(
        description="what the output is", json_schema_extra={"enum": ["text", "json_object", "json_schema"]})
    json_schema: JsonSchemaFormat | None = Field(None, description="with type json_schema")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="with type json_object: the output is a value that it allows")


class StructuredOutputs(BaseModel):
    """Exactly one of json, regex, choice, grammar and json_object."""

    model_config = ConfigDict(strict=True)

    json_: str | dict[str, Any] | None = Field(None, alias="json", description="a JSON schema, or its text")
    regex: str | None = Field(None, description="in Rust's syntax; the whole output matches")
    choice: _Choices | None = Field(None, description="the output is one of these")
    grammar: str | None = Field(None, description="in EBNF (name ::= …) or in llguidance's dialect of Lark")
    json_object: bool | None = Field(None, description="true: the output is any JSON object")
    structural_tag: Any = Field(None, description="not offered")
    disable_any_whitespace: bool | None = Field(
        None, description="of no effect: JSON has one space after each comma and colon, and no other white space")
    disable_additional_properties: bool | None = Field(
        None, description="true is not offered: say additionalProperties: false in the schema")
    whitespace_pattern: str | None = Field(None, description="not offered")


@dataclass(frozen=True, slots=True)
class Constraint:
    """`param` is the field that the client sent it in; of a part of its schema, `places` says so."""

    grammar: Grammar
    param: str
    places: Mapping[str, str] = field(default_factory=dict)  # the path of a part in the grammar's schema → its field


class ConstraintFields(BaseModel):
    """All fields of a body that can constrain its output; one at most may be sent."""

    model_config = ConfigDict(strict=True, extra="allow")

    response_format: ResponseFormat | None = Field(None, description="text (default), any JSON object, or a schema")
    structured_outputs: StructuredOutputs | None = Field(None, description="as in vLLM")
    regex: str | None = Field(None, description="as in SGLang: the whole output matches; in Rust's syntax")
    ebnf: str | None = Field(None, description="as in SGLang: rules `name ::= …`; `root` is the output")
    json_schema: str | dict[str, Any] | None = Field(None, description="as in SGLang: a JSON schema, or its text")
    guided_json: str | dict[str, Any] | None = Field(
        None, description="structured_outputs.json", json_schema_extra=_DEPRECATED)
    guided_regex: str | None = Field(
        None, description="structured_outputs.regex", json_schema_extra=_DEPRECATED)
    guided_choice: _Choices | None = Field(
        None, description="structured_outputs.choice", json_schema_extra=_DEPRECATED)
    guided_grammar: str | None = Field(
        None, description="structured_outputs.grammar", json_schema_extra=_DEPRECATED)
    guided_json_object: bool | None = Field(
        None, description="structured_outputs.json_object", json_schema_extra=_DEPRECATED)

    def constraint(self) -> Constraint | None:
        """The one constraint there is. Raises `InvalidRequest` for a wrong or a second one."""
        if self.model_fields_set.isdisjoint(ConstraintFields.model_fields):
            return None
        found = [*_of_response_format(self.response_format), *_of_structured_outputs(self.structured_outputs),
                 *((name, read, getattr(self, name)) for name, read in _PLAIN.items())]
        asked = [(param, read, value) for param, read, value in found if value is not None and value is not False]
        if len(asked) > 1:
            first, second = asked[0][0], asked[1][0]
            raise InvalidRequest(f"{second}: not together with {first}: an output has one constraint", param=second)
        if not asked:
            return None
        param, read, value = asked[0]
        return constraint_of(param, lambda: read(value))


Reader = Callable[[Any], Grammar]  # of a field's value
Asked = tuple[str, Reader, Any]  # the field, what reads it, its value


def _of_response_format(sent: ResponseFormat | None) -> Iterator[Asked]:
    if sent is None or sent.type == "text":
        return
    if sent.type == "json_object" and sent.schema_ is not None:
        yield "response_format.schema", _json, sent.schema_
    elif sent.type == "json_object":
        yield "response_format", _json_object, True
    elif sent.type == "json_schema":
        if sent.json_schema is None:
            path = "response_format.json_schema"
            raise InvalidRequest(f"{path}: must be an object with name and schema", param=path)
        yield "response_format.json_schema.schema", _json, sent.json_schema.schema_
    else:
        kind = UnsupportedValue if sent.type == "structural_tag" else InvalidRequest
        raise kind("response_format.type: must be text, json_object or json_schema", param="response_format.type")


def _of_structured_outputs(sent: StructuredOutputs | None) -> Iterator[Asked]:
    if sent is None:
        return
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if (value := getattr(sent, name)) is not None and value is not False:
            path = f"structured_outputs.{name}"
            raise UnsupportedValue(f"{path}: this server does not offer it", param=path)
    values = {"json": sent.json_, "regex": sent.regex, "choice": sent.choice, "grammar": sent.grammar,
              "json_object": sent.json_object or None}
    given = [name for name, value in values.items() if value is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: takes exactly one of {', '.join(values)}; got {' and '.join(given) or 'none'}",
            param="structured_outputs")
    yield f"structured_outputs.{given[0]}", _READERS[given[0]], values[given[0]]


def constraint_of(param: str, make: Callable[[], Grammar]) -> Constraint:
    """What `make` makes. Its refusal, made where the client's field is not known, is raised as one of `param`."""
    try:
        return Constraint(make(), param)
    except InvalidRequest as error:
        raise type(error)(f"{param}: {error.message.removeprefix('grammar: ')}", param=param) from None


def _json(schema: str | dict[str, Any]) -> Grammar:
    if isinstance(schema, dict):
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        raise InvalidRequest("must be a JSON schema, and is not JSON") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest("must be a JSON schema, and is JSON but no object")
    return Grammar(GrammarKind.JSON_SCHEMA, schema)


def _json_object(_asked: bool) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, ANY_OBJECT)


def _regex(regex: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, regex)


def _choice(choices: list[str]) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(choices))


def _grammar(text: str) -> Grammar:
    return _ebnf(text) if is_ebnf(text) else Grammar(GrammarKind.LARK, text)


def _ebnf(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, lark_of(text))


_READERS: dict[str, Reader] = {
    "json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar, "json_object": _json_object}
_PLAIN: dict[str, Reader] = {
    "regex": _regex, "ebnf": _ebnf, "json_schema": _json, **{f"guided_{name}": read for name, read in _READERS.items()}}
