"""Who is alive: leases in Redis, by service and replica.

States of a `Lease`: held ⇄ unreachable (Redis does not answer: the last known truth stands, work goes on) and
held → lost → held (the key was gone: registered again with the next lease number, same incarnation) → released.
A lost lease never kills running work. A record of the same id with a newer start wins; the older one is fenced.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from typing import Any, Protocol, TypeAlias, cast

import redis.asyncio as redis
from redis.exceptions import AuthenticationError, RedisError

from common import logs
from common.errors import FingerprintMismatch, Unavailable
from common.metrics import counter
from common.server_url import masked, open_redis
from common.service_record import ServiceRecord

log = logs.get(__name__)

REGISTERED = counter("shoal_registrations_total", "times this service registered: once, and after each lost lease")
LEASE_FAILURES = counter("shoal_lease_failures_total", "heartbeats that did not reach the registry")

Records: TypeAlias = list[ServiceRecord]
_Answer: TypeAlias = list[bytes]

_INDEX = "shoal:services"
_HASH_KEY = "shoal:hash-key"
_CALL_TIMEOUT_S = 2.0

# KEYS: index, own key. ARGV: record, ttl ms, own start, fingerprint or "".
# Returns {"ok", "1" if the key was gone}, {"superseded"} or {"mismatch", record of the other}.
_REGISTER = """
local known = redis.call('GET', KEYS[2])
local mine = cjson.decode(ARGV[1])
if known then
  local old = cjson.decode(known)
  if old.incarnation ~= mine.incarnation and old.started_at_unix_s > tonumber(ARGV[3]) then return {'superseded'} end
end
if ARGV[4] ~= '' then
  for _, key in ipairs(redis.call('SMEMBERS', KEYS[1])) do
    local text = key ~= KEYS[2] and redis.call('GET', key)
    local other = text and cjson.decode(text)
    if other and type(other.fingerprint) == 'table' and other.fingerprint.model == mine.fingerprint.model then
      for field, value in pairs(mine.fingerprint) do
        if other.fingerprint[field] ~= value then return {'mismatch', text} end
      end
    end
  end
end
redis.call('SADD', KEYS[1], KEYS[2])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return {'ok', known and '0' or '1'}
"""


class Lease(Protocol):
    """A registration kept alive in the background."""

    @property
    def record(self) -> ServiceRecord: ...

    async def update(self, **changes: Any) -> None:
        """Publish the record with these fields changed (for example `state="draining"`)."""

    async def release(self) -> None: ...


class Registry(Protocol):
    async def register(self, record: ServiceRecord, ttl_s: float) -> Lease:
        """Raises `FingerprintMismatch` naming both values when a live worker of the model differs."""

    async def list(self) -> Records:
        """All live records. Raises `Unavailable` when the registry cannot be asked."""

    async def deployment_key(self) -> bytes:
        """The secret that keys block hashes: drawn once per deployment, the same for all."""

    async def close(self) -> None: ...


class RedisRegistry:
    """`Registry` on Redis or Valkey. Its calls are made by background tasks, never cancelled with a request."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._key: bytes | None = None

    @staticmethod
    async def connect(url: str, timeout_s: float, ca: str = "") -> RedisRegistry:
        """`ca` is a PEM file for `rediss://`. Raises `Unavailable` when no server lets us in within `timeout_s`."""
        shown = masked(url).rsplit("@", 1)[-1].rpartition("://")[2]
        client = open_redis(url, ca, socket_timeout=_CALL_TIMEOUT_S, socket_connect_timeout=_CALL_TIMEOUT_S)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                async with asyncio.timeout(_CALL_TIMEOUT_S):
                    await client.ping()
                return RedisRegistry(client)
            except AuthenticationError as error:
                await client.aclose()
                raise Unavailable(f"Redis at {shown} refused the credentials: {masked(str(error))}") from None
            except (RedisError, OSError, TimeoutError, ValueError) as error:
                if asyncio.get_running_loop().time() >= deadline:
                    await client.aclose()
                    raise Unavailable(f"Redis at {shown} is not reachable within {timeout_s:g} s "
                                      f"({type(error).__name__}: {masked(str(error))})") from None
            await asyncio.sleep(0.2)

    async def register(self, record: ServiceRecord, ttl_s: float) -> Lease:
        lease = _RedisLease(self, record, ttl_s)
        await lease.start()
        return lease

    async def list(self) -> Records:
        try:
            keys = sorted(await cast(Any, self._client.smembers(_INDEX)))
            texts = await self._client.mget(keys) if keys else []
            gone = [key for key, text in zip(keys, texts, strict=True) if text is None]
            if gone:
                await cast(Any, self._client.srem(_INDEX, *gone))
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"registry: {type(error).__name__}") from error
        return [ServiceRecord.from_json(text) for text in texts if text is not None]

    async def deployment_key(self) -> bytes:
        try:
            drawn = self._key or secrets.token_bytes(32)
            await self._client.set(_HASH_KEY, drawn, nx=True)
            self._key = cast(bytes, await self._client.get(_HASH_KEY))
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"registry: {type(error).__name__}") from error
        return self._key

    async def write(self, record: ServiceRecord, ttl_s: float) -> _Answer:
        """One run of the register script; also restores the deployment key if Redis lost it."""
        if self._key is not None:
            await self._client.set(_HASH_KEY, self._key, nx=True)
        fingerprint = "1" if record.fingerprint else ""
        return cast(_Answer, await cast(Any, self._client.eval(
            _REGISTER, 2, _INDEX, _key_of(record), record.to_json(), str(int(ttl_s * 1000)),
            repr(record.started_at_unix_s), fingerprint)))

    async def erase(self, record: ServiceRecord) -> None:
        await self._client.delete(_key_of(record))
        await cast(Any, self._client.srem(_INDEX, _key_of(record)))

    async def close(self) -> None:
        await self._client.aclose()


class _RedisLease:
    def __init__(self, registry: RedisRegistry, record: ServiceRecord, ttl_s: float) -> None:
        self._registry, self.record, self._ttl_s = registry, record, ttl_s
        self._writing = asyncio.Lock()
        self._fenced = False  # a newer life of the same id holds the key
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            await self._write()
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"registry: {type(error).__name__}") from error
        self._task = asyncio.create_task(self._renew())

    async def update(self, **changes: Any) -> None:
        self.record = dataclasses.replace(self.record, **changes)
        try:
            await self._write()
        except (RedisError, OSError, TimeoutError):
            log.warning("lease_update_deferred", changes=list(changes))  # the next heartbeat carries it

    async def release(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._fenced:
            return
        async with self._writing:
            try:
                await self._registry.erase(self.record)
            except (RedisError, OSError, TimeoutError):
                log.warning("lease_release_failed")  # it ends by its TTL

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 6)
            try:
                await self._write()
            except FingerprintMismatch as error:
                log.error("lease_refused", error=error.message)
            except (RedisError, OSError, TimeoutError) as error:
                LEASE_FAILURES.inc()
                log.warning("lease_unreachable", error=type(error).__name__)

    async def _write(self) -> None:
        async with self._writing:
            answer = await self._registry.write(self.record, self._ttl_s)
            if answer[0] == b"mismatch":
                other = ServiceRecord.from_json(answer[1])
                raise FingerprintMismatch(
                    f"{other.service} {other.service_id} serves this model with {other.fingerprint}, "
                    f"this worker has {self.record.fingerprint}")
            if answer[0] == b"superseded":
                if not self._fenced:
                    log.error("lease_superseded", service_id=self.record.service_id)
                self._fenced = True
            elif answer[1] == b"1":  # the key was gone: the first registration, or a lost lease
                REGISTERED.inc()
                self.record = dataclasses.replace(self.record, lease=self.record.lease + 1)
                log.info("lease_registered", lease=self.record.lease)


def _key_of(record: ServiceRecord) -> str:
    return f"shoal:service:{record.service}:{record.service_id}"


class MemoryRegistry:
    """`Registry` within one process, for tests."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], ServiceRecord] = {}
        self.reachable = True
        self._key = secrets.token_bytes(32)

    async def register(self, record: ServiceRecord, ttl_s: float) -> Lease:
        for other in self.records.values():
            if (record.fingerprint and other.fingerprint and other.service_id != record.service_id
                    and other.fingerprint.model == record.fingerprint.model
                    and other.fingerprint != record.fingerprint):
                raise FingerprintMismatch(f"{other.fingerprint} against {record.fingerprint}")
        lease = _MemoryLease(self, record)
        await lease.update(lease=1)
        return lease

    async def list(self) -> Records:
        if not self.reachable:
            raise Unavailable("registry: made unreachable")
        return [*self.records.values()]

    async def deployment_key(self) -> bytes:
        return self._key

    async def close(self) -> None:
        self.records.clear()


class _MemoryLease:
    def __init__(self, registry: MemoryRegistry, record: ServiceRecord) -> None:
        self._registry, self.record = registry, record

    async def update(self, **changes: Any) -> None:
        self.record = dataclasses.replace(self.record, **changes)
        self._registry.records[self.record.service, self.record.service_id] = self.record

    async def release(self) -> None:
        self._registry.records.pop((self.record.service, self.record.service_id), None)
