"""How the supervisor knows that a process is ready: each gate is asked again and again until it says so.

A gate answers `None` while its process is not ready and never raises for a server that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

from common.config import ServiceConfig
from common.errors import ShoalError
from common.registry import RedisRegistry
from common.service_record import ServiceRecord
from stack.child import Gate, Ready

_ASK_TIMEOUT_S = 1.0
_LIST_EVERY_S = 0.1


async def ask(host: str, port: int, question: bytes, *, tls: bool = False) -> bytes:
    """First bytes of the answer over one TCP connection; empty when there is none within a second.

    With `tls` no certificate is checked: nothing secret is asked, and any answer is a life sign.
    """
    context = ssl._create_unverified_context() if tls else None
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                writer.write(question)
                await writer.drain()
                return await reader.read(4096)
            finally:
                writer.close()
    return b""


def nats_gate(host: str, port: int) -> Gate:
    """Ready when the server greets."""

    async def gate(_spawned_unix_s: float) -> Ready | None:
        return Ready(address=f"{host}:{port}") if (await ask(host, port, b"")).startswith(b"INFO ") else None

    return gate


def valkey_gate(host: str, port: int) -> Gate:
    """Ready when it answers PING; while it loads its file it answers an error."""

    async def gate(_spawned_unix_s: float) -> Ready | None:
        answer = await ask(host, port, b"PING\r\n")
        return Ready(address=f"{host}:{port}") if answer.startswith(b"+PONG") else None

    return gate


class RegistryGates:
    """Gates of services: ready when the registry lists them, registered by this very process."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._registry: RedisRegistry | None = None
        self._records: list[ServiceRecord] = []
        self._listed_at = float("-inf")
        self._listing = asyncio.Lock()

    def gate(self, service: str, service_id: str) -> Gate:
        async def gate(spawned_unix_s: float) -> Ready | None:
            for record in await self._list():
                if (record.service, record.service_id, record.state) != (service, service_id, "ready"):
                    continue
                if record.started_at_unix_s >= spawned_unix_s:  # an older one is a past life, not yet expired
                    return Ready(record.incarnation, record.address, record.metrics_address)
            return None

        return gate

    async def close(self) -> None:
        if self._registry is not None:
            await self._registry.close()

    async def _list(self) -> list[ServiceRecord]:
        """All gates share one question to the registry each `_LIST_EVERY_S`."""
        async with self._listing:
            if time.monotonic() - self._listed_at >= _LIST_EVERY_S:
                try:
                    if self._registry is None:
                        self._registry = await RedisRegistry.connect(
                            self._redis_url, _ASK_TIMEOUT_S, ServiceConfig.load([]).servers_ca_file)
                    self._records = await self._registry.list()
                except ShoalError:
                    self._records = []
                self._listed_at = time.monotonic()
            return self._records
