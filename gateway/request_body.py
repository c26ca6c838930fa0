"""From the bytes of a request to a validated model: bounded while reading, every fault a 400 with a dotted path."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from common.errors import Cancelled, DeadlineExceeded, InvalidRequest, PayloadTooLarge, UnsupportedMediaType

Model = TypeVar("Model", bound=BaseModel)
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool"})
_MAX_PARAM_CHARS = 200


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The body, which must be declared as JSON.

    Raises `UnsupportedMediaType`, `PayloadTooLarge` as soon as the limit is known to be passed, `DeadlineExceeded`
    when it does not arrive in time, `Cancelled` when the client goes away.
    """
    _check_media_type(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise PayloadTooLarge(f"the body has {declared} bytes, the limit is {max_bytes}")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise PayloadTooLarge(f"the body has more than {max_bytes} bytes, the limit")
                chunks.append(chunk)
    except TimeoutError:
        raise DeadlineExceeded(f"the body did not arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise Cancelled("the client went away") from None
    return b"".join(chunks)


def parse(model: type[Model], body: bytes) -> Model:
    """Raises `InvalidRequest`: for JSON that is none, naming the place; for a wrong field, naming its path."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None


def _check_media_type(request: Request) -> None:
    declared = request.headers.get("content-type", "")
    media_type = declared.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or re.fullmatch(r"application/[\w.-]+\+json", media_type)
    if not is_json:
        raise UnsupportedMediaType("the Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("a Content-Encoding is not offered: send the body as it is")


def _invalid(error: ValidationError) -> InvalidRequest:
    """Of the members of a union, the one that got furthest into the value explains the fault best."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {found[0]['msg'].removeprefix('Invalid JSON: ')}")
    first = _path(found[0])
    same_field = [e for e in found if _path(e)[:1] == first[:1]]
    deepest = max(same_field, key=lambda e: len(_path(e)))
    path = _path(deepest)
    messages = dict.fromkeys(e["msg"] for e in same_field if _path(e) == path)
    param = ".".join(path)[:_MAX_PARAM_CHARS]
    return InvalidRequest(f"{param or 'the body'}: {'; or: '.join(messages)}", param=param or None)


def _path(error: ErrorDetails) -> list[str]:
    """Names and indexes of the client's own JSON, without the tags pydantic adds for union members."""
    return [str(part) for part in error["loc"]
            if isinstance(part, int) or (part not in _UNION_MEMBERS and part.isidentifier())]
