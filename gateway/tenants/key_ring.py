"""The API keys that are accepted now. Their file may change while the gateway runs.

States: open (no key is configured: everybody is let in, for good) or guarded. A file that has changed is taken whole or
not at all: while it cannot be read, is broken or holds no key, the keys from before stay, and a metric says so. What
runs when its key is taken away goes on; the next request of that key is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from common import logs
from common.errors import ConfigError, Unauthenticated
from gateway.tenants import metrics
from gateway.tenants.key_file import (
    KeyEntry,
    digest_of,
    distinct,
    limits_by_tenant,
    parse_key_file,
    plain_entry,
    read_key_file,
)
from gateway.tenants.tenant import Caller, RateLimits, Tenant

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class _Keys:
    """One state of all keys; `callers` by the digest of the key."""

    entries: tuple[KeyEntry, ...]
    limits: dict[str, RateLimits]
    callers: dict[bytes, tuple[KeyEntry, Caller]]
    file_digest: bytes


class KeyRing:
    """`listed` are keys with commas between them, `file` a key file; both may be empty. Raises `ConfigError`."""

    def __init__(self, listed: str = "", file: str = "", now: Callable[[], float] = time.time) -> None:
        self._listed, self._file, self._now = listed, file, now
        self._salt_key = secrets.token_bytes(32)  # until the deployment's own is known
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._failure = ""
        self._keys = _Keys((), {}, {}, b"")
        self._take(self._load())

    @property
    def is_open(self) -> bool:
        """No key is configured: all are let in."""
        return not self._keys.entries

    @property
    def entries(self) -> tuple[KeyEntry, ...]:
        return self._keys.entries

    def tenant(self, name: str) -> Tenant | None:
        limits = self._keys.limits.get(name)
        return None if limits is None else Tenant(name, limits, self._salt_key)

    @property
    def num_tenants(self) -> int:
        return len(self._keys.limits)

    def has_tenant(self, name: str) -> bool:
        """While no key is configured, whoever comes is of the tenant that there is."""
        return self.is_open or name in self._keys.limits

    def find(self, key: bytes) -> Caller:
        """Whose key it is. Raises `Unauthenticated`.

        Looked up by its SHA-256: whatever the time of that tells is of a hash, and nobody can choose what to send so
        that its hash comes nearer and nearer to a stored one. The one found is compared in constant time.
        """
        given = digest_of(key)
        found = self._keys.callers.get(given)
        if found is None or not hmac.compare_digest(given, found[0].digest):
            raise Unauthenticated("this API key is not accepted")
        entry, caller = found
        if entry.expires is not None and self._now() >= entry.expires.timestamp():
            raise Unauthenticated("this API key has expired")
        return caller

    def use_salt_key(self, key: bytes) -> None:
        """The secret that all gateways of the deployment share; cache salts of tenants come from it."""
        self._salt_key = key
        self._take(self._keys)

    def look_now(self) -> None:
        """Have `watch` look at the file at once."""
        self._wake.set()

    async def watch(self, every_s: float) -> None:
        """Look at the file again and again, until cancelled. It is compared by content: its times prove nothing."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._wake.wait()
            self._wake.clear()
            with contextlib.suppress(ConfigError):  # counted and logged
                await self.reload()

    async def reload(self) -> bool:
        """Take the file if it has changed; True if so. Raises `ConfigError` for a broken one, and keeps the keys."""
        if not self._file:
            return False
        async with self._lock:
            try:
                keys = await asyncio.to_thread(self._load)
            except ConfigError as error:
                if error.message != self._failure:
                    self._failure = error.message
                    metrics.KEY_FILE_LOADS.labels("broken").inc()
                    log.error("key_file_broken", error=error.message, num_keys_kept=len(self.entries))
                metrics.KEY_FILE_BROKEN.set(1)
                raise
            self._failure = ""
            metrics.KEY_FILE_BROKEN.set(0)
            if keys is self._keys:
                return False
            self._take(keys)
            metrics.KEY_FILE_LOADS.labels("ok").inc()
            log.info("key_file_loaded", num_keys=len(keys.entries), num_tenants=len(keys.limits))
            return True

    def _load(self) -> _Keys:
        """The keys as they are now; the present ones themselves when the file is the same. Runs in any thread."""
        entries = [plain_entry(key.strip(), "api_keys") for key in self._listed.split(",") if key.strip()]
        file_digest = b""
        if self._file:
            content = read_key_file(self._file)
            file_digest = hashlib.sha256(content).digest()
            if file_digest == self._keys.file_digest:
                return self._keys
            entries += parse_key_file(content, self._file)
        kept = distinct(entries)
        return _Keys(kept, limits_by_tenant(kept), {}, file_digest)

    def _take(self, keys: _Keys) -> None:
        tenants = {name: Tenant(name, limits, self._salt_key) for name, limits in keys.limits.items()}
        callers = {e.digest: (e, Caller(tenants[e.tenant], e.models, e.priority, e.is_admin)) for e in keys.entries}
        metrics.forget_tenants(self._keys.limits.keys() - keys.limits.keys())
        metrics.KEYS.set(len(callers))
        self._keys = _Keys(keys.entries, keys.limits, callers, keys.file_digest)
