"""A caller's view of who is alive, polled from the registry.

A record's life: listed → missing (absent from a poll that succeeded) → dropped after `grace_s`, unless it comes
back; a draining record is dropped at once when it goes. While the registry cannot be asked nothing changes: mass
expiry is not death. A new incarnation under the same id replaces the old one at once.
"""

from __future__ import annotations

import asyncio
import time

from common import logs
from common.errors import Unavailable
from common.registry import Registry
from common.service_record import ServiceRecord

log = logs.get(__name__)

Key = tuple[str, str]  # (service, service_id)


class Directory:
    """Poll with `start`, read with `records`. Never blocks a request on the registry."""

    def __init__(self, registry: Registry, poll_s: float = 0.5, grace_s: float = 10.0) -> None:
        self._registry, self._poll_s, self._grace_s = registry, poll_s, grace_s
        self._records: dict[Key, ServiceRecord] = {}
        self._missing_since: dict[Key, float] = {}
        self._listed_models: set[tuple[str, str]] = set()  # (service, model) of all records ever; few, never forgotten
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.reachable = False

    async def start(self) -> None:
        await self.refresh()
        self._task = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def records(self, service: str, model: str | None = None) -> list[ServiceRecord]:
        """Live records of a service that take new work, optionally of one model, in a stable order."""
        return [r for _, r in sorted(self._records.items())
                if r.service == service and r.state == "ready" and (model is None or model in r.models)]

    def get(self, service: str, service_id: str) -> ServiceRecord | None:
        """The record in any state, or None when it is gone."""
        return self._records.get((service, service_id))

    def all(self, service: str) -> list[ServiceRecord]:
        """Records in any state."""
        return [r for _, r in sorted(self._records.items()) if r.service == service]

    def has_listed(self, service: str, model: str) -> bool:
        """Whether the service ever had a record with the model."""
        return (service, model) in self._listed_models

    async def changed(self, timeout_s: float) -> None:
        """Return at the next change, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    async def refresh(self) -> None:
        try:
            listed = {(r.service, r.service_id): r for r in await self._registry.list()}
            self.reachable = True
        except Unavailable:
            self.reachable = False
            self._missing_since.clear()  # what was missing before an outage gets its whole grace again
            return
        before = dict(self._records)
        self._records.update(listed)
        self._listed_models.update((r.service, model) for r in listed.values() for model in r.models)
        now = time.monotonic()
        for key in self._records.keys() - listed.keys():
            since = self._missing_since.setdefault(key, now)
            if now - since > self._grace_s or self._records[key].state == "draining":
                del self._records[key]
        self._missing_since = {k: t for k, t in self._missing_since.items() if k not in listed and k in self._records}
        if self._records != before:
            self._changed.set()
            self._changed = asyncio.Event()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except Exception:
                log.exception("directory_poll_failed")
