"""From the bytes of a request to a validated model: bounded while reading, every fault a 400 with a dotted path.

A body that is being read holds no slot: who sends half of one and waits keeps nobody else from work. So bodies in
reading have bounds of their own, on their number and on the bytes of all that have come.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import ClientDisconnect, Request

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    UnsupportedMediaType,
)
from gateway.field_types import MAX_PARAM_CHARS

Model = TypeVar("Model", bound=BaseModel)
MAX_ITEMS = (1 << 20) + (1 << 18)  # of all lists and objects of a body: a prompt of token ids is the longest
MAX_NODES = 1 << 17  # lists, objects and keys, which cost more
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool"})


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int  # of one body
    timeout_s: float  # for one body
    max_at_once: int
    max_bytes_at_once: int  # of all bodies in reading, as far as they have come
    retry_after_s: float  # what a request is told that finds no room


class BodyReader:
    """Reads the bodies of all requests."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._num_bodies = 0
        self._num_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The body, which must be declared as JSON.

        Raises `UnsupportedMediaType`, `PayloadTooLarge` as soon as the limit is known to be passed, `Overloaded` when
        there is no room for it, `DeadlineExceeded` when it does not arrive in time, `Cancelled` when the client goes
        away.
        """
        limits = self._limits
        _check_media_type(request)
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limits.max_bytes:
            raise PayloadTooLarge(f"the body has {declared} bytes, the limit is {limits.max_bytes}")
        if self._num_bodies >= limits.max_at_once:
            raise self._overloaded(f"{limits.max_at_once} request bodies")
        chunks: list[bytes] = []
        self._num_bodies += 1
        try:
            async with asyncio.timeout(limits.timeout_s):
                await self._read_into(chunks, request)
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not arrive within {limits.timeout_s:g} s") from None
        except ClientDisconnect:
            raise Cancelled("the client went away") from None
        finally:
            self._num_bodies -= 1
            self._num_bytes -= sum(map(len, chunks))
        return b"".join(chunks)

    async def _read_into(self, chunks: list[bytes], request: Request) -> None:
        limits, size = self._limits, 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limits.max_bytes:
                raise PayloadTooLarge(f"the body has more than {limits.max_bytes} bytes, the limit")
            if self._num_bytes + len(chunk) > limits.max_bytes_at_once:
                raise self._overloaded(f"{limits.max_bytes_at_once} bytes of request bodies")
            self._num_bytes += len(chunk)
            chunks.append(chunk)

    def _overloaded(self, what: str) -> Overloaded:
        return Overloaded(f"this gateway is reading {what}, its limit", retry_after_s=self._limits.retry_after_s)


def parse(model: type[Model], body: bytes) -> Model:
    """Raises `InvalidRequest`: for JSON that is none, naming the place; for a wrong field, naming its path."""
    _check_num_values(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None


def _check_num_values(body: bytes) -> None:
    """Parsing holds up the event loop: for long where there are millions of values, and hardly for long texts."""
    if _num_items(body) <= MAX_ITEMS and _num_nodes(body) <= MAX_NODES:
        return
    outside = b"".join(body.replace(rb"\\", b"").replace(rb'\"', b"").split(b'"')[::2])  # of the texts
    for num, most, what in ((_num_items(outside), MAX_ITEMS, "items of lists and objects"),
                            (_num_nodes(outside), MAX_NODES, "lists, objects and keys")):
        if num > most:
            raise InvalidRequest(f"the body has {num} {what}, the limit is {most}")


def _num_items(body: bytes) -> int:
    return body.count(b",")


def _num_nodes(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _check_media_type(request: Request) -> None:
    declared = request.headers.get("content-type", "")
    media_type = declared.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or re.fullmatch(r"application/[\w.-]+\+json", media_type)
    if not is_json:
        raise UnsupportedMediaType("the Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("a Content-Encoding is not offered: send the body as it is")


def _invalid(error: ValidationError) -> InvalidRequest:
    """Of the members of a union, the one that got furthest into the value explains the fault best: by far the one
    that found all items right and one too many.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)
    if found[0]["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {found[0]['msg'].removeprefix('Invalid JSON: ')}")
    first = _path(found[0])
    same_field = [e for e in found if _path(e)[:1] == first[:1]]
    same_field = [e for e in same_field if e["type"] == "too_long"] or same_field
    deepest = max(same_field, key=lambda e: len(_path(e)))
    path = _path(deepest)
    messages = dict.fromkeys(e["msg"] for e in same_field if _path(e) == path)
    param = ".".join(path)[:MAX_PARAM_CHARS]
    return InvalidRequest(f"{param or 'the body'}: {'; or: '.join(messages)}", param=param or None)


def _path(error: ErrorDetails) -> list[str]:
    """Names and indexes of the client's own JSON, without the tags pydantic adds for union members."""
    return [str(part) for part in error["loc"]
            if isinstance(part, int) or (part not in _UNION_MEMBERS and part.isidentifier())]
