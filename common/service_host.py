"""What every service does around its work: connect, listen, register, drain, stop.

States: starting → ready → draining → stopped. SIGTERM and SIGINT begin the drain: health turns NOT_SERVING and the
registration says `draining`, running work gets `drain_timeout_s` to finish, then the process exits 0. A start that
cannot reach NATS or Redis, take its port or load its model ends with one line and exit code 1 (configuration: 2).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Protocol, TypeVar

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from common import logs, rpc
from common.advertise import advertised_host
from common.bus import Bus, NatsBus
from common.config import ServiceConfig, load_or_exit
from common.errors import ConfigError, InternalError, ShoalError
from common.event_loop_watch import watch_event_loop
from common.host_port import host_port
from common.metrics import INFO, MetricsServer
from common.registry import Lease, RedisRegistry, Registry
from common.service_record import Fingerprint, ServiceRecord
from common.tracing import start_tracing
from common.wire_security import load_security, metrics_address, metrics_host

log = logs.get(__name__)
Config = TypeVar("Config", bound=ServiceConfig)
LIVE = "live"  # health of this name says that the process answers; of the empty name, that it takes work


class Deps:
    """What a service is given from outside; tests put in-memory ones here."""

    def __init__(self, bus: Bus, registry: Registry) -> None:
        self.bus, self.registry = bus, registry
        self.failure: str | None = None
        self.failed = asyncio.Event()

    def fail(self, why: str) -> None:
        """The service cannot go on: the process drains what it can and exits 1."""
        log.error("service_failed", why=why)
        self.failure = self.failure or why
        self.failed.set()


class Service(Protocol):
    """What `build(config, deps)` of each service returns."""

    async def start(self) -> None:
        """Return when requests can be taken. Raises `ShoalError` with one clear line when it cannot."""

    async def drain(self) -> None:
        """Take no new work; return when the running work is done. The host bounds the wait."""

    async def stop(self) -> None:
        """End what is left, answering it; release everything. Called once, also after a failed start."""


class ServiceHost:
    """The parts around a gRPC service: server, health, metrics, registration."""

    def __init__(self, config: ServiceConfig, registry: Registry) -> None:
        self.config = config = config.named()
        self.service_id = config.service_id
        self.incarnation = secrets.token_hex(8)
        self.security = load_security(config)
        self.server: grpc.aio.Server = rpc.new_server(self.security)
        self._health_server: grpc.aio.Server | None = None
        self._registry = registry
        self._health = HealthServicer()
        self._metrics: MetricsServer | None = None
        self._lease: Lease | None = None
        self.address = ""

    async def listen(self) -> str:
        """Bind and start serving; health stays NOT_SERVING until `register`. Returns `host:port`."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        config = self.config
        try:
            port = rpc.bind(self.server, host_port(config.host, config.port), self.security)
            self._metrics = MetricsServer(metrics_host(config), config.metrics_port)
            if config.health_port:
                await self._serve_health(host_port(config.host, config.health_port))
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"cannot bind {config.host}: port {config.port} (metrics {config.metrics_port}, health "
                              f"{config.health_port}) is taken or not allowed: {error}", param="port") from None
        await self.server.start()
        self.address = host_port(advertised_host(config), port)
        return self.address

    async def _serve_health(self, address: str) -> None:
        """Probes of an orchestrator may know neither TLS nor tokens; this port has nothing else to say."""
        self._health_server = rpc.new_server()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
        rpc.bind(self._health_server, address)
        await self._health_server.start()

    async def register(
        self, *, models: Sequence[str] = (), role: str = "", fingerprint: Fingerprint | None = None,
        capacity: dict[str, int] | None = None, address: str = "", host_id: str = "", transports: Sequence[str] = (),
    ) -> None:
        record = ServiceRecord(
            service=self.config.service, service_id=self.service_id, incarnation=self.incarnation,
            address=address or self.address,
            metrics_address=metrics_address(self.config, self._metrics.port) if self._metrics else "",
            models=tuple(models), role=role, fingerprint=fingerprint, capacity=capacity or {},
            started_at_unix_s=time.time(), host_id=host_id, transports=tuple(transports), version=version())
        self._lease = await self._registry.register(record, self.config.lease_ttl_s)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        log.info("ready", address=record.address, metrics=record.metrics_address, models=list(models))

    async def begin_drain(self) -> None:
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._lease is not None:
            await self._lease.update(state="draining")

    async def close(self) -> None:
        if self._lease is not None:
            await self._lease.release()
        await self.server.stop(grace=0.5)
        if self._health_server is not None:
            await self._health_server.stop(grace=None)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)


def version() -> str:
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "0+source"


async def open_deps(config: ServiceConfig) -> Deps:
    """Connect to Redis and NATS; raises `Unavailable` naming the one that does not answer."""
    registry = await RedisRegistry.connect(config.redis_url, config.connect_timeout_s, config.servers_ca_file)
    try:
        bus = await NatsBus.connect(
            config.nats_url, config.service, config.connect_timeout_s, config.servers_ca_file)
    except ShoalError:
        await registry.close()
        raise
    return Deps(bus, registry)


async def serve(service: Service, deps: Deps, drain_timeout_s: float) -> None:
    """Start, wait for a signal or a failure, drain, stop. A second signal cuts the drain short."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    stopping: set[asyncio.Task[Any]] = {asyncio.create_task(signals.get()), asyncio.create_task(deps.failed.wait())}
    starting = asyncio.create_task(service.start())
    watching = asyncio.create_task(watch_event_loop())
    try:
        await asyncio.wait({starting, *stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await asyncio.wait(stopping, return_when=asyncio.FIRST_COMPLETED)
            log.info("draining", limit_s=drain_timeout_s)
            again = asyncio.create_task(signals.get())
            draining = asyncio.create_task(service.drain())
            done, _ = await asyncio.wait(
                {again, draining}, timeout=drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if draining not in done:
                log.warning("drain_cut_short")
            for task in (again, draining):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
    finally:
        for task in (starting, watching, *stopping):
            task.cancel()
        await service.stop()


def run(config_cls: type[Config], build: Callable[[Config, Deps], Service], argv: Sequence[str] | None = None) -> None:
    """The whole `main` of a service; exits 0 after a drain, 1 when it cannot start, 2 for bad configuration."""
    config: Any = load_or_exit(config_cls, sys.argv[1:] if argv is None else argv).named()
    logs.setup(config.service, config.service_id, config.log_level, config.log_format)
    INFO.labels(config.service, version()).set(1)

    async def main() -> None:
        load_security(config)  # refuses before anything is connected
        deps = await open_deps(config)
        try:
            await serve(build(config, deps), deps, config.drain_timeout_s)
            if deps.failure is not None:
                raise InternalError(deps.failure)
        finally:
            await deps.bus.close()
            await deps.registry.close()

    try:
        tracing = start_tracing(config.service, config.service_id, version())
        try:
            uvloop.run(main())
        finally:
            tracing.stop()
    except ShoalError as error:
        print(f"{config.service}: {error.message}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
