"""The host of a service without NATS and Redis."""

from __future__ import annotations

from typing import Any, ClassVar

import grpc.aio
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import service_host
from common.bus import MemoryBus
from common.config import ServiceConfig
from common.errors import ConfigError
from common.registry import MemoryRegistry
from common.service_host import Deps, ServiceHost
from common.tracing import Tracing


class DemoConfig(ServiceConfig):
    """For these tests."""

    service: ClassVar[str] = "demo"


class Refusing:
    """A service that cannot start."""

    async def start(self) -> None:
        raise ConfigError("no")

    async def drain(self) -> None:
        """Never asked."""

    async def stop(self) -> None:
        """Holds nothing."""


def ids_of_a_run(monkeypatch: pytest.MonkeyPatch, *argv: str) -> list[str]:
    """The name of the replica as its logs, its traces, its service and its registration have it."""
    seen: list[str] = []

    async def deps(_config: Any) -> Deps:
        return Deps(MemoryBus(), MemoryRegistry())

    def build(config: DemoConfig, given: Deps) -> Refusing:
        seen.extend([config.service_id, ServiceHost(config, given.registry).service_id])
        return Refusing()

    def start_tracing(_service: str, service_id: str, _version: str) -> Tracing:
        seen.append(service_id)
        return Tracing()

    monkeypatch.setattr(service_host, "open_deps", deps)
    monkeypatch.setattr(service_host, "start_tracing", start_tracing)
    monkeypatch.setattr(service_host.logs, "setup", lambda _service, service_id, *_: seen.append(service_id))
    with pytest.raises(SystemExit) as ended:
        service_host.run(DemoConfig, build, argv)
    assert ended.value.code == 2
    return seen


def test_a_replica_has_one_name_everywhere_and_no_two_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (ids_of_a_run(monkeypatch) for _ in range(2))
    assert len(first) == len(second) == 4
    assert len({*first}) == len({*second}) == 1
    assert first[0].startswith("demo-")
    assert first[0] != second[0]
    assert {*ids_of_a_run(monkeypatch, "--service-id", "demo-7")} == {"demo-7"}


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_ipv6_address_is_served_and_registered_as_one_can_call_it(host: str) -> None:
    registry = MemoryRegistry()
    at = ServiceHost(DemoConfig(host=host), registry)
    address = await at.listen()
    await at.register()
    (record,) = await registry.list()
    assert record.address == address
    assert address.startswith("[::1]:")
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with httpx2.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"http://{record.metrics_address}/metrics", timeout=5)).status_code == 200
    await at.close()
