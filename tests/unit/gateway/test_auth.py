from __future__ import annotations

from typing import Any

import pytest

from common.errors import Unauthenticated
from gateway.auth import OPEN_PATHS, KeyGuard
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.tenant import ANYBODY, caller_of


async def reached(
    path: str, *authorization: bytes, keys: tuple[str, ...] = ("good-key",), query: bytes = b""
) -> bool:
    """Whether a request gets through to the application."""
    calls: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(scope["path"])

    scope = {"type": "http", "path": path, "query_string": query,
             "headers": [(b"authorization", a) for a in authorization]}
    try:
        await KeyGuard(app, KeyRing(",".join(keys)))(scope, None, None)  # type: ignore[arg-type]
    except Unauthenticated:
        assert calls == []
    return bool(calls)


@pytest.mark.parametrize("sent", [
    [], [b"Bearer wrong-key"], [b"Bearer"], [b"Bearer "], [b"bearer good-key"], [b"good-key"], [b"Bearer good-key "],
    [b"Bearer  good-key"], [b"Bearer good-ke"], [b"Basic good-key"], [b"Bearer good-key", b"Bearer good-key"],
    [b"Bearer \xff"], [b"Bearer\tgood-key"]])
async def test_only_the_exact_header_sent_once_opens_a_guarded_path(sent: list[bytes]) -> None:
    assert not await reached("/v1/models", *sent)


async def test_the_right_key_no_keys_at_all_and_open_paths_get_through() -> None:
    assert await reached("/v1/models", b"Bearer good-key")
    assert await reached("/v1/models", keys=())
    for path in OPEN_PATHS:
        assert await reached(path)


@pytest.mark.parametrize("path", [
    "/health/", "//health", "/HEALTH", "/health/x", "/ready?x", "", "/", "health", "/new", "/metrics"])
async def test_a_path_that_is_not_exactly_on_the_list_is_guarded(path: str) -> None:
    assert not await reached(path)


@pytest.mark.parametrize("query", [b"verbose", b"verbose=1", b"%76erbose", b"x"])
async def test_readiness_is_open_without_details_only(query: bytes) -> None:
    assert await reached("/ready")
    assert not await reached("/ready", query=query)
    assert await reached("/ready", b"Bearer good-key", query=query)
    assert await reached("/health", query=query), "it has no details"


async def test_the_guard_says_whose_key_it_was_and_a_client_cannot_say_it_itself() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(caller_of(scope).tenant.name)

    scope = {"type": "http", "path": "/x", "query_string": b"tenant=acme",
             "headers": [(b"x-tenant", b"acme"), (b"authorization", b"Bearer good-key")]}
    await KeyGuard(app, KeyRing("good-key"))(scope, None, None)  # type: ignore[arg-type]
    assert seen == ["default"]
    assert caller_of({"type": "http"}) is ANYBODY
