from __future__ import annotations

import pytest

from gateway.tenants.rate_limits import Level, Standing, duration


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (0.0001, "1ms"), (0.0199, "20ms"), (0.9991, "1s"), (1, "1s"), (1.2, "2s"), (59.1, "1m0s"), (60, "1m0s"),
    (360, "6m0s"), (86.4, "1m27s"), (3600, "1h0m0s"), (3661.5, "1h1m2s"), (90_000, "25h0m0s")])
def test_a_duration_reads_as_openai_writes_it_and_never_too_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_tell_of_each_limit_that_there_is() -> None:
    level = Level(60, 59, 1.0, 0.0)
    assert Standing(level, None).headers() == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s"}
    assert Standing(None, level).headers().keys() == {
        "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"}


def test_a_refusal_names_its_limit_and_when_one_is_free() -> None:
    error = Standing(Level(60, 5, 55.0, 0.0), Level(100, 0, 90.0, 30.5), "tokens").error()
    assert (error.http_status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 30.5)
    assert "100 tokens per minute" in error.message
    assert "31s" in error.message
