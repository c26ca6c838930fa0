from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, Unauthenticated
from gateway.auth import OPEN_PATHS, KeyGuard, load_keys


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
        await KeyGuard(app, keys)(scope, None, None)  # type: ignore[arg-type]
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


def test_keys_come_from_the_list_and_the_file_once_each(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-2\n\n key-3 \n")
    assert load_keys(" key-1,key-2 ,", str(file)) == ("key-1", "key-2", "key-3")
    assert load_keys("", "") == ()


@pytest.mark.parametrize("listed", ["abc", "with space", "naïve-key"])
def test_a_key_that_cannot_be_sent_stops_the_start_and_is_not_shown(listed: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_keys(listed, "")
    assert listed not in error.value.message


def test_a_key_file_that_is_missing_or_empty_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_file"):
        load_keys("", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_keys("", str(tmp_path / "empty"))
