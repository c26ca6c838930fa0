"""Browsers on other origins, over HTTP."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.config import GatewayConfig
from tests.http_gateway import http_gateway

ORIGIN = "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
KEY = {"authorization": "Bearer key-of-test"}


@pytest.mark.parametrize("allowed", [f"http://localhost:3000, {ORIGIN}", "*"])
async def test_a_page_of_an_allowed_origin_may_ask_without_a_key_and_read_every_answer(allowed: str) -> None:
    async with http_gateway(cors_origins=allowed, api_keys="key-of-test") as gateway:
        asked = await gateway.client.options("/v1/chat/completions", headers={"origin": ORIGIN, **PREFLIGHT})
        assert asked.status_code == 200
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert "authorization" in asked.headers["access-control-allow-headers"]
        shown = "*" if allowed == "*" else ORIGIN
        for headers, status, stream in ((KEY, 200, False), (KEY, 200, True), ({}, 401, False)):
            answer = await gateway.chat(headers={"origin": ORIGIN, **headers}, stream=stream)
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == shown
            exposed = answer.headers["access-control-expose-headers"]
            for name in ("x-request-id", "retry-after", "x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens"):
                assert name in exposed.split(", ")


async def test_a_page_of_another_origin_is_not_allowed() -> None:
    async with http_gateway(cors_origins=ORIGIN) as gateway:
        other = {"origin": "https://other.example"}
        asked = await gateway.client.options("/v1/chat/completions", headers={**other, **PREFLIGHT})
        assert asked.status_code == 400
        for answer in (asked, await gateway.chat(headers=other)):
            assert "access-control-allow-origin" not in answer.headers


async def test_by_default_no_origin_is_allowed() -> None:
    async with http_gateway(api_keys="key-of-test") as gateway:
        asked = await gateway.client.options("/v1/chat/completions", headers={"origin": ORIGIN, **PREFLIGHT})
        assert asked.status_code == 401
        answer = await gateway.chat(headers={"origin": ORIGIN, **KEY})
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("listed", [
    f"{ORIGIN}/path", "app.example", f"*,{ORIGIN}", "https://App.example", f"{ORIGIN}/"])
def test_what_no_browser_sends_as_an_origin_stops_the_start(listed: str) -> None:
    with pytest.raises(ValidationError, match="origin"):
        GatewayConfig(cors_origins=listed)
