from __future__ import annotations

import pytest

from common import errors
from common.errors import ShoalError, from_wire


def all_classes(base: type[ShoalError] = ShoalError) -> list[type[ShoalError]]:
    return [base, *(c for sub in base.__subclasses__() for c in all_classes(sub))]


@pytest.mark.parametrize("cls", all_classes(), ids=lambda c: c.__name__)
def test_every_error_is_the_same_after_the_wire(cls: type[ShoalError]) -> None:
    sent = cls("what happened", param="messages.0.content", retry_after_s=1.5)
    got = from_wire(sent.wire())
    assert (got.code, got.message, got.param, got.retry_after_s, got.http_status) == (
        sent.code, sent.message, sent.param, sent.retry_after_s, sent.http_status)


def test_an_unknown_code_becomes_an_internal_error() -> None:
    got = from_wire({"code": "invented_later", "message": "m"})
    assert isinstance(got, errors.ShoalError)
    assert got.http_status == 500
