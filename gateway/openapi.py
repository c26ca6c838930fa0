"""What `/openapi.json` says of bodies that are read by hand, and of errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_ERROR_SCHEMA = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]}}}},
}
_ERRORS = {
    "400": "a value is wrong or not offered; `param` says which", "401": "no API key, or a wrong one",
    "404": "no such model or path", "413": "the body is too large", "415": "the body is not declared as JSON",
    "500": "a fault of this server", "503": "no room or no worker; retry-after says when to come back",
    "504": "the deadline passed",
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model` as its JSON body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe_errors(app: FastAPI) -> None:
    """Make `app.openapi()` know the bodies and the error envelope."""
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, definitions = models_json_schema([(m, "validation") for m in _BODIES], ref_template=_REF)
    schemas = {k: v for k, v in document.get("components", {}).get("schemas", {}).items() if "Validation" not in k}
    document["components"] = {"schemas": {**schemas, **definitions["$defs"], "Error": _ERROR_SCHEMA}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(operation["responses"], path, "requestBody" in operation)
    return document


def _responses(declared: dict[str, Any], path: str, has_body: bool) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    found = {status: answer for status, answer in declared.items() if status != "422"}
    for status, text in _ERRORS.items():
        if has_body or (status == "404" and "{" in path) or status in ("401", "500"):
            found[status] = {"description": text, "content": content}
    if path == "/ready":
        found["503"] = {"description": "not ready, or draining"}
    return found
