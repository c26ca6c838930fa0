"""The one place where a `ShoalError` becomes an HTTP answer: OpenAI's envelope, status and retry headers."""

from __future__ import annotations

import math

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ShoalError,
    UnsupportedMediaType,
)

MAX_MESSAGE_CHARS = 1000
DEFAULT_RETRY_AFTER_S = 1.0
FAULT_TEXT = "a fault of this server; its log has this x-request-id"
_RETRY_STATUSES = (429, 503)
_FROM_STATUS: dict[int, type[ShoalError]] = {
    404: NotFound, 405: MethodNotAllowed, 413: PayloadTooLarge, 415: UnsupportedMediaType,
}


def envelope(error: ShoalError) -> bytes:
    """`{"error": {message, type, param, code}}` as JSON; the message is cut at `MAX_MESSAGE_CHARS`."""
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 1] + "…"
    fields = {"message": message, "type": error.openai_type, "param": error.param, "code": error.code}
    try:
        return orjson.dumps({"error": fields})
    except TypeError:  # a lone surrogate, which JSON text may carry in and UTF-8 may not carry out
        return orjson.dumps({"error": {**fields, "message": _printable(message), "param": _printable(error.param)}})


def error_response(error: ShoalError, headers: dict[str, str] | None = None) -> Response:
    """The whole answer; `headers` are added."""
    own = {"www-authenticate": "Bearer"} if error.http_status == 401 else {}
    return Response(
        envelope(error), error.http_status, {**retry_headers(error), **own, **(headers or {})}, "application/json")


def retry_headers(error: ShoalError) -> dict[str, str]:
    """When to come back: on each 429 and 503, in whole seconds (rounded up) and in milliseconds."""
    if error.http_status not in _RETRY_STATUSES:
        return {}
    wait_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return {"retry-after": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def from_http_exception(exception: HTTPException) -> ShoalError:
    """The router's own refusals (no such path, wrong verb) in our words."""
    kind = _FROM_STATUS.get(exception.status_code)
    if kind is None:
        kind = InvalidRequest if 400 <= exception.status_code < 500 else InternalError
    texts: dict[type[ShoalError], str] = {
        NotFound: "no such path", MethodNotAllowed: "this path does not take that method"}
    return kind(texts.get(kind, str(exception.detail)))


def _printable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode()
