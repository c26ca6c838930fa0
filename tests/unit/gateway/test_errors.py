from __future__ import annotations

import json

import pytest
from starlette.exceptions import HTTPException

from common.errors import InvalidRequest, Overloaded, ShoalError, Unauthenticated, WorkerLost
from gateway.errors import MAX_MESSAGE_CHARS, envelope, error_response, from_http_exception, retry_headers


def test_the_envelope_has_exactly_the_four_fields() -> None:
    body = json.loads(envelope(InvalidRequest("bad", param="a.0.b")))
    assert body == {"error": {
        "message": "bad", "type": "invalid_request_error", "param": "a.0.b", "code": "invalid_value"}}


@pytest.mark.parametrize("message", ["x" * 5000, "\ud800 lone", ""])
def test_any_message_fits_and_is_valid_json(message: str) -> None:
    shown = json.loads(envelope(ShoalError(message)).decode())["error"]["message"]
    assert len(shown) <= MAX_MESSAGE_CHARS


def test_retry_headers_are_on_503_and_429_only_and_round_up() -> None:
    assert retry_headers(Overloaded("full", retry_after_s=1.2)) == {"retry-after": "2", "retry-after-ms": "1200"}
    assert retry_headers(WorkerLost("gone")) == {"retry-after": "1", "retry-after-ms": "1000"}
    assert retry_headers(InvalidRequest("bad", retry_after_s=3)) == {}


def test_a_missing_key_is_answered_with_the_scheme_to_use() -> None:
    answer = error_response(Unauthenticated("no key"))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(("status", "code"), [
    (404, "not_found"), (405, "method_not_allowed"), (413, "payload_too_large"), (418, "invalid_value"),
    (500, "internal_error")])
def test_the_routers_refusals_become_ours(status: int, code: str) -> None:
    assert from_http_exception(HTTPException(status)).code == code
