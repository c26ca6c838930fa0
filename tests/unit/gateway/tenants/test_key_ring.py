from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from common.errors import ConfigError, Unauthenticated
from gateway.tenants import metrics
from gateway.tenants.key_ring import KeyRing
from gateway.tenants.tenant import RateLimits
from tests.http_gateway import until


def hashed(key: str, said: str = "") -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {said}\n"


def accepts(ring: KeyRing, key: str) -> bool:
    try:
        ring.find(key.encode())
    except Unauthenticated:
        return False
    return True


def write(file: Path, text: str | None) -> None:
    """None: the file is gone."""
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text.encode("utf-8", "surrogateescape"))


def append(file: Path, text: str) -> None:
    write(file, file.read_text() + text)


def write_unnoticed(file: Path, text: str) -> None:
    """Neither its size nor its times tell."""
    before = file.stat()
    write(file, text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"shoal_gateway_{name}", labels) or 0.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(hashed("first-key", "tenant=acme requests_per_minute=5"))
    return path


def test_keys_come_from_the_list_and_the_file_once_each(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nkey-2\n\n key-3 \n")
    ring = KeyRing(" key-1,key-2 ,", str(file))
    assert len(ring.entries) == 3
    assert all(accepts(ring, key) for key in ("key-1", "key-2", "key-3"))
    assert not ring.is_open
    assert KeyRing().is_open


@pytest.mark.parametrize("listed", ["abc", "with space", "naïve-key"])
def test_a_key_that_cannot_be_sent_stops_the_start_and_is_not_shown(listed: str) -> None:
    with pytest.raises(ConfigError) as error:
        KeyRing(listed)
    assert listed not in error.value.message


def test_a_key_file_that_is_missing_or_empty_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="api_key_file"):
        KeyRing("", str(tmp_path / "none"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no key"):
        KeyRing("", str(tmp_path / "empty"))


def test_a_hashed_key_opens_as_its_plain_text_and_its_digest_does_not(file: Path) -> None:
    ring = KeyRing("", str(file))
    caller = ring.find(b"first-key")
    assert (caller.tenant.name, caller.tenant.limits) == ("acme", RateLimits(requests_per_minute=5))
    digest = hashlib.sha256(b"first-key")
    for key in (digest.hexdigest(), f"sha256:{digest.hexdigest()}", "first-ke", "first-key2"):
        assert not accepts(ring, key)


def test_a_key_ends_at_its_moment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(hashed("good-key", "expires=2027-01-31T12:00:00Z"))
    now = [1801396800.0 - 1]  # 2027-01-31T12:00:00Z is 1801396800
    ring = KeyRing("", str(file), now=lambda: now[0])
    assert accepts(ring, "good-key")
    now[0] += 1
    with pytest.raises(Unauthenticated, match="expired"):
        ring.find(b"good-key")


async def test_a_changed_file_is_taken_whole(file: Path) -> None:
    ring = KeyRing("listed-key", str(file))
    assert await ring.reload() is False
    write(file, hashed("second-key", "tenant=acme requests_per_minute=9"))
    before = sample("key_file_loads_total", result="ok")
    assert await ring.reload() is True
    assert sample("key_file_loads_total", result="ok") == before + 1
    assert [accepts(ring, key) for key in ("first-key", "second-key", "listed-key")] == [False, True, True]
    acme = ring.tenant("acme")
    assert acme is not None
    assert acme.limits.requests_per_minute == 9
    assert sample("api_keys") == 2


@pytest.mark.parametrize("broken", ["", "# none left\n", "sha256:abc", "\udcff", None])
async def test_a_broken_file_keeps_the_keys_from_before_and_is_counted_once(file: Path, broken: str | None) -> None:
    ring = KeyRing("", str(file))
    before = sample("key_file_loads_total", result="broken")
    write(file, broken)
    for _ in range(3):
        with pytest.raises(ConfigError):
            await ring.reload()
    assert accepts(ring, "first-key")
    assert not ring.is_open
    assert not accepts(ring, "no-such-key")
    assert sample("key_file_loads_total", result="broken") == before + 1
    assert sample("key_file_broken") == 1
    write(file, hashed("third-key"))
    assert await ring.reload()
    assert sample("key_file_broken") == 0
    assert accepts(ring, "third-key")


async def test_the_watch_sees_a_change_of_the_same_size_and_time_and_outlives_a_broken_file(file: Path) -> None:
    ring = KeyRing("", str(file))
    watching = asyncio.create_task(ring.watch(0.01))
    try:
        write_unnoticed(file, hashed("other-key", "tenant=acme requests_per_minute=5"))
        await until(lambda: accepts(ring, "other-key"), "the other key")
        before = sample("key_file_loads_total", result="broken")
        write(file, "sha256:broken")
        await until(lambda: sample("key_file_loads_total", result="broken") > before, "the file is found broken")
        write(file, hashed("last-key"))
        await until(lambda: accepts(ring, "last-key"), "the last key")
        assert not accepts(ring, "other-key")
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_look_now_does_not_wait_for_the_next_look(file: Path) -> None:
    ring = KeyRing("", str(file))
    watching = asyncio.create_task(ring.watch(3600))
    try:
        await asyncio.sleep(0)
        write(file, hashed("other-key"))
        ring.look_now()
        await until(lambda: accepts(ring, "other-key"), "the other key")
        assert not accepts(ring, "first-key")
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_gateways_of_one_deployment_salt_alike(file: Path) -> None:
    def salt(ring: KeyRing) -> str:
        return ring.find(b"first-key").tenant.salted("s")

    one, two = KeyRing("", str(file)), KeyRing("", str(file))
    assert salt(one) != salt(two), "never an unkeyed salt, not even before the secret is known"
    for ring in (one, two):
        ring.use_salt_key(b"k" * 32)
    assert salt(one) == salt(two)
    append(file, hashed("more-key"))
    await one.reload()
    assert salt(one) == salt(two), "a reload keeps the secret"


async def test_series_of_a_tenant_that_is_gone_are_dropped(file: Path) -> None:
    ring = KeyRing("", str(file))
    metrics.TENANT_REQUESTS.labels("acme").inc()
    metrics.TENANT_TOKENS.labels("acme", "prompt").inc()
    metrics.RATE_LIMITED.labels("acme", "requests").inc()
    write(file, hashed("second-key", "tenant=other"))
    await ring.reload()
    text = [s for m in REGISTRY.collect() for s in m.samples if s.labels.get("tenant") == "acme"]
    assert text == []


def test_one_digest_is_compared_however_many_keys_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(hashed(f"key-{number}", f"tenant=t{number}") for number in range(50)))
    ring, compared = KeyRing("", str(file)), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or compare(a, b))
    assert ring.find(b"key-49").tenant.name == "t49"
    assert compared == [hashlib.sha256(b"key-49").digest()]
    assert not accepts(ring, "key-50")


async def test_without_a_file_a_reload_changes_and_counts_nothing() -> None:
    ring = KeyRing("listed-key")
    before = sample("key_file_loads_total", result="ok")
    assert await ring.reload() is False
    assert sample("key_file_loads_total", result="ok") == before
    assert accepts(ring, "listed-key")


@pytest.mark.parametrize("written", ["{hex}", "{HEX}", "SHA256:{hex}", "Sha256:{hex} tenant=a", "SHA256:{HEX}"])
def test_a_digest_where_a_key_belongs_stops_the_start_and_is_not_shown(tmp_path: Path, written: str) -> None:
    digest = hashlib.sha256(b"some-key").hexdigest()
    text = written.format(hex=digest, HEX=digest.upper())
    (tmp_path / "keys").write_text(text + "\n")
    places = [(("", str(tmp_path / "keys")), "line 1"), ((text, ""), "api_keys")]
    for arguments, where in places if ":" in written else places[:1]:
        with pytest.raises(ConfigError, match=where) as error:
            KeyRing(*arguments)
        assert digest not in error.value.message.lower()


def test_a_key_of_64_hex_digits_may_be_given_as_a_setting() -> None:
    assert accepts(KeyRing("ab" * 32, ""), "ab" * 32)


async def test_a_ring_knows_the_tenants_that_its_keys_have_now(file: Path) -> None:
    ring = KeyRing("", str(file))
    write(file, hashed("second-key", "tenant=other"))
    assert (ring.has_tenant("acme"), ring.has_tenant("other")) == (True, False)
    await ring.reload()
    assert (ring.has_tenant("acme"), ring.has_tenant("other")) == (False, True)
    assert KeyRing().has_tenant("default")
