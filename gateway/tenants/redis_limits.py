"""Rate limits in Redis or Valkey, one hash a tenant, read and written by one script under Redis's own clock.

A level is kept in units of 1/60,000,000 of a request or token: a bucket of L per minute then gains exactly L units
each microsecond, all levels are whole numbers below 2**53, and every gateway computes the same ones. A missing bucket
is full; a key lives until its buckets are. A clock that goes back (another server took over) does not stop the filling
for longer than until the next write.

States of the store: connected ⇄ away. After `MAX_FAILURES` calls in a row that failed no other is tried for `RETRY_S`,
so that requests wait for a dead Redis twice, not each. A call says nothing of Redis if this process was held up itself
or had its turn late. A charge that fails is lost, and counted by the caller.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final, cast

import redis.asyncio as redis
from redis.exceptions import RedisError

from common import logs
from common.errors import Unavailable
from gateway.tenants import metrics
from gateway.tenants.rate_limits import Level, Standing
from gateway.tenants.tenant import Tenant

log = logs.get(__name__)

RETRY_S: Final = 1.0
MAX_FAILURES: Final = 2
LATE_S: Final = 0.02  # a timer that fires so long after its time tells of a stall of this loop
MAX_CALLS: Final = 16  # at once; more wait their turn, within their deadline
_FAILURES = (RedisError, OSError, TimeoutError)

CLOCK: Final = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
"""

# KEYS: the tenant's hash. ARGV: limit of requests, of tokens (0: none), requests and tokens to take, and 1 to take them
# only if there is one of each limited kind. Returns what refused ("", "requests", "tokens"; of both the one that is
# back later), then the units left of each kind, as decimal strings.
SPEND: Final = """
local UNIT, LEAST = 60000000, -9e15
local stored = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local elapsed = math.max(0, now - (tonumber(stored[1]) or now))
local names, left, refused, wait, until_full = {'requests', 'tokens'}, {}, '', 0, 0
for kind = 1, 2 do
  local limit = tonumber(ARGV[kind])
  left[kind] = math.min(limit * UNIT, (tonumber(stored[kind + 1]) or limit * UNIT) + elapsed * limit)
  if limit > 0 and ARGV[5] == '1' and left[kind] < UNIT and (UNIT - left[kind]) / limit > wait then
    refused, wait = names[kind], (UNIT - left[kind]) / limit
  end
end
if refused == '' and (ARGV[3] ~= '0' or ARGV[4] ~= '0') then
  local fields = {'at', string.format('%.0f', now)}
  for kind = 1, 2 do
    local limit = tonumber(ARGV[kind])
    if limit > 0 then
      left[kind] = math.max(LEAST, left[kind] - tonumber(ARGV[kind + 2]) * UNIT)
      until_full = math.max(until_full, (limit * UNIT - left[kind]) / limit)
      fields[#fields + 1] = names[kind]
      fields[#fields + 1] = string.format('%.0f', left[kind])
    end
  end
  redis.call('HSET', KEYS[1], unpack(fields))
  redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(until_full / 1000) + 1000))
end
return {refused, string.format('%.0f', left[1]), string.format('%.0f', left[2])}
"""
UNITS: Final = 60_000_000  # of one request or token


class RedisLimits:
    """`RateLimitStore`. `client` connects when first used; whoever made it closes it."""

    def __init__(self, client: redis.Redis, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._away_until = 0.0  # of the loop's clock
        self._num_failures = 0  # in a row
        self._reachable = True
        metrics.RATE_LIMITS_CONNECTED.set(1)

    async def admit(self, tenant: Tenant) -> Standing:
        return await self._spend(tenant, num_requests=1, if_there=True)

    async def charge(self, tenant: Tenant, num_tokens: int) -> None:
        await self._spend(tenant, num_tokens=num_tokens)

    async def show(self, tenant: Tenant) -> Standing:
        return await self._spend(tenant)

    async def _spend(
        self, tenant: Tenant, *, num_requests: int = 0, num_tokens: int = 0, if_there: bool = False
    ) -> Standing:
        limits = tenant.limits
        requests, tokens = limits.requests_per_minute or 0, limits.tokens_per_minute or 0
        refused, *left = await self._call(
            f"shoal:limits:{tenant.name}", requests, tokens, num_requests, num_tokens, int(if_there))
        return Standing(
            _level(requests, int(left[0])), _level(tokens, int(left[1])), cast(Any, refused.decode()))

    async def _call(self, key: str, *arguments: int) -> list[bytes]:
        clock = asyncio.get_running_loop().time
        if clock() < self._away_until:
            raise Unavailable("rate limits: Redis did not answer a moment ago")
        start, had_turn_at = clock(), math.inf
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                had_turn_at = clock()
                answer = await cast(Any, self._client.eval(CLOCK + SPEND, 1, key, *map(str, arguments)))
        except _FAILURES as error:
            is_late = clock() > start + self._timeout_s + LATE_S
            if not is_late and had_turn_at - start <= self._timeout_s / 2:
                self._note_failure(clock())
            raise Unavailable(f"rate limits: {type(error).__name__}") from error
        self._num_failures = 0
        self._note(True)
        return cast(list[bytes], answer)

    def _note_failure(self, now: float) -> None:
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self._away_until = now + RETRY_S
            self._note(False)

    def _note(self, reachable: bool) -> None:
        if reachable != self._reachable:
            log.warning("rate_limits_connected" if reachable else "rate_limits_disconnected")
        self._reachable = reachable
        metrics.RATE_LIMITS_CONNECTED.set(reachable)


def _level(limit: int, units: int) -> Level | None:
    if not limit:
        return None
    return Level(limit, max(0, units // UNITS), (limit * UNITS - units) / limit / 1e6,
                 max(0, UNITS - units) / limit / 1e6)
