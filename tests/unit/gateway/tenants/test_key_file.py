from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from gateway.tenants.key_file import (
    MAX_KEYS,
    MAX_PRIORITY,
    MAX_REQUESTS_PER_MINUTE,
    MAX_TENANTS,
    MAX_TOKENS_PER_MINUTE,
    KeyEntry,
    digest_of,
    distinct,
    entry_line,
    limits_by_tenant,
    parse_key_file,
    plain_entry,
    read_key_file,
)
from gateway.tenants.tenant import RateLimits

HEX = hashlib.sha256(b"k").hexdigest()
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
ENTRIES = st.builds(
    KeyEntry, digest=st.binary(min_size=32, max_size=32), tenant=NAMES, name=NAMES | st.just(""),
    limits=st.builds(RateLimits, st.none() | st.integers(1, MAX_REQUESTS_PER_MINUTE),
                     st.none() | st.integers(1, MAX_TOKENS_PER_MINUTE)),
    models=st.none() | st.frozensets(st.from_regex(r"[!-+\--~]{1,20}", fullmatch=True), min_size=1, max_size=3),
    expires=st.none() | st.datetimes(timezones=st.just(UTC)),
    priority=st.none() | st.integers(-MAX_PRIORITY, MAX_PRIORITY), is_admin=st.booleans())


def parse(text: str) -> tuple[KeyEntry, ...]:
    return parse_key_file(text.encode(), "f")


@given(ENTRIES)
def test_a_written_line_is_read_as_the_same_entry(entry: KeyEntry) -> None:
    assert parse(entry_line(entry)) == (entry,)


WORDS = st.sampled_from([
    "sha256:", f"sha256:{HEX}", "tenant=", "tenant=a", "expires=", "9999-12-31T23:59:59-23:59", "0001-01-01", "models=",
    "admin=", "priority=", "requests_per_minute=", "1" * 13, "=", "#", "\n", " ", "key", ","])


@given(st.lists(WORDS | st.text(max_size=3), max_size=12))
def test_any_file_is_taken_or_refused_in_words(parts: list[str]) -> None:
    content, refused = "".join(parts).encode("utf-8", "surrogatepass"), None
    try:
        entries = distinct(parse_key_file(content, "f"))
        limits_by_tenant(entries)
        assert entries
        assert all(entry.expires is None or entry.expires.timestamp() for entry in entries)
    except ConfigError as error:
        refused = error
    if refused is not None:
        assert refused.param == "api_key_file"
        assert HEX not in refused.message


def test_plain_keys_and_comments_read_as_they_always_did() -> None:
    entries = parse("# ours\nkey-2\n\n key-3 \n")
    assert entries == (plain_entry("key-2", "x"), plain_entry("key-3", "x"))
    assert [e.tenant for e in entries] == ["default", "default"]
    assert [e.line for e in entries] == [2, 4]


def test_a_hashed_line_says_what_its_key_allows() -> None:
    (entry,) = parse(f"sha256:{HEX} tenant=acme name=laptop requests_per_minute=60 tokens_per_minute=9 models=a,b/c "
                     "expires=2027-01-31 priority=-5 admin=true")
    assert entry == KeyEntry(
        digest_of(b"k"), "acme", "laptop", RateLimits(60, 9), frozenset({"a", "b/c"}),
        datetime(2027, 1, 31, tzinfo=UTC), -5, True)
    (later,) = parse(f"sha256:{HEX} expires=2027-01-31T02:00:00+02:00")
    assert later.expires == datetime(2027, 1, 31, 2, tzinfo=timezone(timedelta(hours=2)))
    assert later.tenant == "default"


@pytest.mark.parametrize(("line", "named"), [
    ("sha256:abc tenant=a", "64 hex"), (f"sha256:{HEX.upper()}", "64 hex"), ("sha256:", "64 hex"),
    (f"sha256:{HEX} tenat=a", "word 2 is no field"),
    (f"sha256:{HEX} tenant=a words", "word 3"), (f"sha256:{HEX} priority=1words", "priority"),
    (f"sha256:{HEX} tenant=", "tenant"), (f"sha256:{HEX} tenant=a:b", "tenant"),
    (f"sha256:{HEX} tenant=-a", "tenant"), (f"sha256:{HEX} tenant={'a' * 65}", "tenant"),
    (f"sha256:{HEX} tenant=ä", "tenant"), (f"sha256:{HEX} tenant=a tenant=a", "twice"),
    (f"sha256:{HEX} requests_per_minute=0", "requests_per_minute"),
    (f"sha256:{HEX} requests_per_minute=1e3", "requests_per_minute"),
    (f"sha256:{HEX} requests_per_minute=1000001", "1000000"), (f"sha256:{HEX} tokens_per_minute=-1", "tokens"),
    (f"sha256:{HEX} tokens_per_minute=100000001", "100000000"), (f"sha256:{HEX} models=", "models"),
    (f"sha256:{HEX} models=a,,b", "models"), (f"sha256:{HEX} expires=tomorrow", "expires"),
    (f"sha256:{HEX} admin=yes", "admin"), (f"sha256:{HEX} priority=1001", "priority"), ("abc", "at least 4"),
    ("two words", "no space"), ("naïve-key", "ASCII")])
def test_a_line_that_is_wrong_is_refused_by_number_and_field(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(f"# first\n{line}\n")
    assert "line 2" in error.value.message
    assert named in error.value.message
    assert "words" not in error.value.message
    assert HEX not in error.value.message


@pytest.mark.parametrize(("content", "named"), [
    (b"", "holds no key"), (b"# x\n", "holds no key"), (b"\xff\xfe", "UTF-8")])
def test_a_file_without_keys_is_refused(content: bytes, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_key_file(content, "f")


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        read_key_file(str(tmp_path / "none"))
    with (tmp_path / "large").open("wb") as large:
        large.truncate(9 * 1024 * 1024)
    with pytest.raises(ConfigError, match="larger than"):
        read_key_file(str(tmp_path / "large"))


def test_limits_are_the_tenants_wherever_they_stand() -> None:
    other = hashlib.sha256(b"l").hexdigest()
    entries = parse(f"sha256:{HEX} tenant=a requests_per_minute=5\nsha256:{other} tenant=a tokens_per_minute=7\nplain")
    assert limits_by_tenant(entries) == {"a": RateLimits(5, 7), "default": RateLimits()}
    with pytest.raises(ConfigError, match="line 2: requests_per_minute=6"):
        limits_by_tenant(parse(f"sha256:{HEX} tenant=a requests_per_minute=5\n"
                               f"sha256:{other} tenant=a requests_per_minute=6"))


def test_a_key_may_be_there_twice_only_with_the_same_facts() -> None:
    assert len(distinct(parse(f"sha256:{HEX} tenant=a\nsha256:{HEX} tenant=a"))) == 1
    with pytest.raises(ConfigError, match="line 2 is the key of line 1 again"):
        distinct(parse(f"sha256:{HEX} tenant=a\nsha256:{HEX} tenant=b"))
    with pytest.raises(ConfigError, match="api_keys"):
        distinct((plain_entry("listed-key", "x"), KeyEntry(digest_of(b"listed-key"), tenant="a", line=3)))


def test_keys_and_tenants_are_bounded() -> None:
    with pytest.raises(ConfigError, match=f"{MAX_KEYS} keys"):
        distinct(KeyEntry(digest_of(str(n).encode())) for n in range(MAX_KEYS + 1))
    with pytest.raises(ConfigError, match=f"{MAX_TENANTS} tenants"):
        limits_by_tenant(KeyEntry(b"", tenant=f"t{n}") for n in range(MAX_TENANTS + 1))
