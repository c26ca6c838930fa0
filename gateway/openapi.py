"""What `/openapi.json` says where the framework cannot know it: bodies read by hand, streams, keys, and every refusal.

A route says of itself: its body (`body_of`), its answer (`response_model`), its events (`stream_of`) and what only it
refuses (`refusals`). What comes from the layers in front of all routes is added here.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.answer_schemas import ChatCompletionChunk, CompletionChunk
from gateway.auth import OPEN_PATHS
from gateway.chat_request import ChatRequest
from gateway.completion_request import CompletionRequest
from gateway.text_requests import DetokenizeRequest, TokenizeRequest
from gateway.utility_schemas import Error

_REF: Final = "#/components/schemas/{model}"
_BY_HAND: Final[tuple[type[BaseModel], ...]] = (
    ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest, ChatCompletionChunk, CompletionChunk, Error)
_REFUSALS: Final = {
    400: "a value is wrong or not offered; `param` says which",
    401: "no API key, or a wrong one",
    403: "this key is not for that",
    404: "no such model or path",
    413: "the body is too large",
    415: "the body is not declared as JSON",
    429: "a rate limit of this key is reached; retry-after says when to come back",
    500: "a fault of this server",
    503: "no room or no worker; retry-after says when to come back",
    504: "the deadline passed",
}
_OF_A_BODY: Final = (400, 403, 404, 413, 415, 429, 503, 504)
_RETRY_HEADERS: Final = {
    "retry-after": {"description": "whole seconds", "schema": {"type": "integer"}},
    "retry-after-ms": {"description": "the same in milliseconds", "schema": {"type": "integer"}}}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model` as its JSON body."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _ref(model)}}}}


def stream_of(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers with events of `chunk` where the body asks for a stream."""
    text = (f"with `stream: true`: server-sent events, the data of each a {chunk.__name__}, the last one `[DONE]`; "
            "or, in place of that, an Error")
    return {200: {"content": {"text/event-stream": {"schema": {"type": "string", "description": text}}}}}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may refuse with these."""
    return {status: _refusal(status) for status in statuses}


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` tell all of it."""
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes, separate_input_output_schemas=False)
    _, made = models_json_schema([(m, "validation") for m in _BY_HAND], ref_template=_REF)
    components = document.get("components", {})
    schemas = {name: s for name, s in components.get("schemas", {}).items() if "ValidationError" not in name}
    for name in schemas.keys() & made["$defs"].keys():  # the framework's has no nulls, so the fields are compared
        assert schemas[name]["properties"].keys() == made["$defs"][name]["properties"].keys(), f"two schemas: {name}"
    document["components"] = {"schemas": {**schemas, **made["$defs"]}, "securitySchemes": {
        "key": {"type": "http", "scheme": "bearer", "description": "where this server was given keys"}}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(operation, path)
            if path not in OPEN_PATHS:
                operation["security"] = [{"key": []}, {}]
    return document


def _responses(operation: dict[str, Any], path: str) -> dict[str, Any]:
    """Those declared, and those of the layers in front; 422 is the framework's own guess and never comes."""
    found = {status: answer for status, answer in operation["responses"].items() if status != "422"}
    statuses = [500]
    if path not in OPEN_PATHS or path == "/ready":  # which is open without a query only
        statuses.append(401)
    if "requestBody" in operation:
        statuses += _OF_A_BODY
    for status in statuses:
        found.setdefault(str(status), _refusal(status))
    return dict(sorted(found.items()))


def _refusal(status: int) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _REFUSALS[status], "content": {"application/json": {"schema": _ref(Error)}}}
    if status in (429, 503):
        answer["headers"] = _RETRY_HEADERS
    return answer


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
