"""Rate limits on a real Valkey: against a model under a clock of the test's own, and several gateways at once."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Unavailable
from common.server_url import open_redis
from gateway.tenants import redis_limits
from gateway.tenants.key_file import MAX_REQUESTS_PER_MINUTE, MAX_TOKENS_PER_MINUTE
from gateway.tenants.rate_limits import Standing
from gateway.tenants.redis_limits import SPEND, UNITS, RedisLimits
from gateway.tenants.tenant import RateLimits, Tenant
from tests.delay_proxy import DelayProxy
from tests.servers import RealServer

START_US = 1_796_000_000_000_000


@asynccontextmanager
async def limits_on(url: str, timeout_s: float = 5.0) -> AsyncIterator[RedisLimits]:
    client = open_redis(url)
    try:
        yield RedisLimits(client, timeout_s)
    finally:
        await client.aclose()


def tenant(requests: int | None = None, tokens: int | None = None, name: str = "acme") -> Tenant:
    return Tenant(name, RateLimits(requests, tokens))


def remaining(standing: Standing) -> tuple[int | None, int | None]:
    return (standing.requests and standing.requests.remaining, standing.tokens and standing.tokens.remaining)


class Bucket:
    """The model: a level that fills by `limit` a minute up to `limit`, in exact fractions."""

    def __init__(self, limit: int) -> None:
        self.limit, self.level, self.at = limit, Fraction(limit), START_US

    def fill(self, now: int) -> None:
        self.level = min(Fraction(self.limit), self.level + Fraction((now - self.at) * self.limit, UNITS))
        self.at = now


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs the script on a Valkey, with the time given: `script(key, ..., now_us)`."""
    server = RealServer("valkey", cast(Path, tmp_path_factory.mktemp("valkey"))).start()
    client = redis.Redis.from_url(server.url)
    timed = "local now = tonumber(ARGV[6])\n" + SPEND
    yield lambda key, *arguments: client.eval(timed, 1, key, *map(str, arguments))
    client.close()
    server.remove()


STEPS = st.lists(st.tuples(
    st.integers(0, 90_000_000), st.one_of(st.just(("admit", 1)), st.just(("show", 0)), st.tuples(
        st.just("charge"), st.integers(0, 300_000)))), max_size=30)


@settings(max_examples=150, deadline=None)
@given(requests=st.sampled_from([0, 1, 3, 7, 60, 997, MAX_REQUESTS_PER_MINUTE]),
       tokens=st.sampled_from([0, 1, 7, 1000, 99_991, MAX_TOKENS_PER_MINUTE]), steps=STEPS)
def test_the_script_does_what_the_model_does(
    script: Any, requests: int, tokens: int, steps: list[tuple[int, tuple[str, int]]]
) -> None:
    key, now, buckets = f"k:{uuid4().hex}", START_US, (Bucket(requests), Bucket(tokens))
    for wait_us, (kind, number) in steps:
        now += wait_us
        for bucket in buckets:
            bucket.fill(now)
        lacking = [b for b in buckets if b.limit and b.level < 1] if kind == "admit" else []
        taken = (number if kind == "admit" else 0, number if kind == "charge" else 0)
        if not lacking:
            for bucket, took in zip(buckets, taken, strict=True):
                bucket.level -= took if bucket.limit else 0
        refused, *left = script(key, requests, tokens, *taken, int(kind == "admit"), now)
        assert bool(refused) == bool(lacking)
        assert [int(units) for units in left] == [b.level * UNITS for b in buckets], "exact, not nearly"
        if refused:
            named = buckets[0] if refused == b"requests" else buckets[1]
            assert max((1 - b.level) / b.limit for b in lacking) == (1 - named.level) / named.limit


def test_a_clock_that_goes_back_does_not_stop_the_filling(script: Any) -> None:
    hour_us = 3_600_000_000
    assert script("back", 1, 0, 1, 0, 1, START_US)[0] == b""
    assert script("back", 1, 0, 1, 0, 1, START_US - hour_us)[0] == b"requests"
    assert script("back", 1, 0, 0, 1, 0, START_US - hour_us)[0] == b""  # any write takes the new clock
    assert script("back", 1, 0, 1, 0, 1, START_US - hour_us + 60_000_000)[0] == b""


def test_a_debt_of_any_size_keeps_the_numbers_whole(script: Any) -> None:
    for _ in range(3):
        left = script("debt", 0, MAX_TOKENS_PER_MINUTE, 0, 100_000_000, 0, START_US)[2]
    assert math.trunc(float(left)) == int(left) >= -9 * 10**15


async def test_a_rested_tenant_may_use_a_minute_at_once_and_no_more(valkey: RealServer) -> None:
    async with limits_on(valkey.url) as limits:
        standings = [await limits.admit(tenant(requests=3)) for _ in range(4)]
        assert [s.refused_by for s in standings] == ["", "", "", "requests"]
        assert [remaining(s)[0] for s in standings] == [2, 1, 0, 0]
        last = standings[-1].requests
        assert last is not None
        assert 0 < last.one_in_s <= 20
        assert 40 < last.full_in_s <= 60


async def test_gateways_agree_under_load(valkey: RealServer) -> None:
    async with limits_on(valkey.url) as one, limits_on(valkey.url) as two:
        asked = [gateway.admit(tenant(requests=5)) for gateway in (one, two) for _ in range(40)]
        standings = await asyncio.gather(*asked)
        assert sum(not s.refused_by for s in standings) == 5
        assert remaining(await one.show(tenant(requests=5))) == remaining(await two.show(tenant(requests=5)))


async def test_a_tenant_in_debt_is_refused_until_it_is_paid_and_others_are_not(valkey: RealServer) -> None:
    async with limits_on(valkey.url) as one, limits_on(valkey.url) as two:
        acme, other = tenant(tokens=100), tenant(tokens=100, name="other")
        assert not (await one.admit(acme)).refused_by
        await one.charge(acme, 250)
        refused = await two.admit(acme)
        assert refused.refused_by == "tokens"
        assert refused.tokens is not None
        assert 80 < refused.tokens.one_in_s <= 90.6, "151 tokens at 100 a minute"
        assert not (await two.admit(other)).refused_by


async def test_both_limits_count_and_a_refused_request_takes_nothing(valkey: RealServer) -> None:
    async with limits_on(valkey.url) as limits:
        acme = tenant(requests=2, tokens=10)
        assert remaining(await limits.admit(acme)) == (1, 10)
        await limits.charge(acme, 100)
        assert (await limits.admit(acme)).refused_by == "tokens"
        assert remaining(await limits.show(acme)) == (1, 0)
        assert (await limits.show(acme)).refused_by == "", "to show takes nothing and refuses nothing"


async def test_new_limits_hold_for_what_was_used_before(valkey: RealServer) -> None:
    async with limits_on(valkey.url) as limits:
        await limits.charge(tenant(tokens=1000), 400)
        assert remaining(await limits.show(tenant(tokens=100)))[1] == 100
        assert remaining(await limits.show(tenant(tokens=10_000)))[1] in range(600, 10_000)


async def test_a_bucket_that_is_full_again_leaves_no_key(valkey: RealServer) -> None:
    async with limits_on(valkey.url) as limits:
        await limits.admit(tenant(requests=MAX_REQUESTS_PER_MINUTE))
        client = open_redis(valkey.url)
        assert 0 < await client.pttl("shoal:limits:acme") <= 1001
        await limits.charge(tenant(tokens=60), 120)
        assert 118_000 < await client.pttl("shoal:limits:acme") <= 121_001
        await client.aclose()


async def test_a_dead_redis_is_said_at_once_and_found_again(
    valkey: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "RETRY_S", 0.05)
    async with limits_on(valkey.url) as limits:
        await limits.admit(tenant(requests=9))
        valkey.kill()
        for _ in range(2):
            with pytest.raises(Unavailable):
                await limits.admit(tenant(requests=9))
        valkey.start()
        async with asyncio.timeout(10):
            while True:
                try:
                    assert not (await limits.admit(tenant(requests=9))).refused_by
                    return
                except Unavailable:
                    await asyncio.sleep(0.02)


async def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_ones(
    valkey: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "RETRY_S", 0.0)
    async with DelayProxy(valkey.port, 0.5) as slow, limits_on(f"redis://127.0.0.1:{slow.port}/0", 0.1) as limits:
        with pytest.raises(Unavailable):
            await limits.admit(tenant(requests=9, name="a"))
        slow.delay_s = 0.0
        async with asyncio.timeout(10):
            while True:
                try:
                    standing = await limits.show(tenant(tokens=77, name="b"))
                    break
                except Unavailable:
                    await asyncio.sleep(0.02)
        assert remaining(standing) == (None, 77)


async def test_after_a_failure_nobody_waits_for_a_while(valkey: RealServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_limits, "RETRY_S", 3600.0)
    async with DelayProxy(valkey.port, 60.0) as silent, limits_on(f"redis://127.0.0.1:{silent.port}/0", 0.1) as limits:
        for why in ("TimeoutError", "TimeoutError", "a moment ago"):
            with pytest.raises(Unavailable, match=why):
                await limits.admit(tenant(requests=9))


async def test_a_stall_of_the_gateway_itself_says_nothing_of_redis(
    valkey: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "RETRY_S", 3600.0)
    async with DelayProxy(valkey.port, 0.0) as slow, limits_on(f"redis://127.0.0.1:{slow.port}/0", 0.3) as limits:
        await limits.admit(tenant(requests=9))
        slow.delay_s = 0.1
        for _ in range(3):
            asked = asyncio.create_task(limits.show(tenant(requests=9)))
            await asyncio.sleep(0.03)
            time.sleep(0.5)  # noqa: ASYNC251 (the stall)
            with pytest.raises(Unavailable, match="TimeoutError"):
                await asked
        slow.delay_s = 0.0
        assert not (await limits.admit(tenant(requests=9))).refused_by


async def test_a_call_that_had_its_turn_late_says_nothing_of_redis(
    valkey: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "RETRY_S", 3600.0)
    monkeypatch.setattr(redis_limits, "MAX_CALLS", 1)
    async with DelayProxy(valkey.port, 0.0) as slow, limits_on(f"redis://127.0.0.1:{slow.port}/0", 0.4) as limits:
        await limits.admit(tenant(requests=9))
        slow.delay_s = 0.15
        shown = await asyncio.gather(*(limits.show(tenant(requests=9)) for _ in range(9)), return_exceptions=True)
        assert len([answer for answer in shown if isinstance(answer, Unavailable)]) >= 6
        slow.delay_s = 0.0
        assert not (await limits.admit(tenant(requests=9))).refused_by


async def test_one_failure_among_answers_is_not_an_outage(
    valkey: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limits, "RETRY_S", 3600.0)
    async with DelayProxy(valkey.port, 0.0) as slow, limits_on(f"redis://127.0.0.1:{slow.port}/0", 0.2) as limits:
        for _ in range(3):
            slow.delay_s = 60.0
            with pytest.raises(Unavailable, match="TimeoutError"):
                await limits.show(tenant(requests=9))
            slow.delay_s = 0.0
            await limits.show(tenant(requests=9))
