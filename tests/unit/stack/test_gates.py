from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.registry import MemoryRegistry, RedisRegistry
from common.service_record import ServiceRecord
from stack import ports
from stack.console import Console
from stack.gates import RegistryGates, nats_gate, valkey_gate
from stack.servers import nats_spec, valkey_spec
from stack.supervisor import Supervisor


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> MemoryRegistry:
    made = MemoryRegistry()

    async def connect(_url: str, _timeout_s: float, _ca: str = "") -> MemoryRegistry:
        return made

    monkeypatch.setattr(RedisRegistry, "connect", connect)
    monkeypatch.setattr("stack.gates._LIST_EVERY_S", 0.0)
    return made


def record(**changes: object) -> ServiceRecord:
    facts: dict[str, object] = {"service": "decode", "service_id": "decode-0", "incarnation": "new", "address": "a:1",
                                "metrics_address": "a:2", "started_at_unix_s": 100.0, **changes}
    return ServiceRecord(**facts)  # type: ignore[arg-type]


async def test_a_service_is_ready_when_its_own_process_has_registered(registry: MemoryRegistry) -> None:
    gate = RegistryGates("redis://x").gate("decode", "decode-0")
    assert await gate(99.0) is None
    await registry.register(record(), 6)
    ready = await gate(99.0)
    assert ready is not None
    assert (ready.incarnation, ready.address, ready.metrics_address) == ("new", "a:1", "a:2")


@pytest.mark.parametrize("other", [
    {"started_at_unix_s": 98.0},  # the lease of the life before
    {"service_id": "decode-1"},
    {"service": "prefill"},
    {"state": "draining"},
])
async def test_another_record_does_not_open_the_gate(registry: MemoryRegistry, other: dict[str, object]) -> None:
    await registry.register(record(**other), 6)
    assert await RegistryGates("redis://x").gate("decode", "decode-0")(99.0) is None


async def test_an_unreachable_registry_is_not_ready_rather_than_an_error(registry: MemoryRegistry) -> None:
    gate = RegistryGates("redis://x").gate("decode", "decode-0")
    await registry.register(record(), 6)
    registry.reachable = False
    assert await gate(99.0) is None
    registry.reachable = True
    assert await gate(99.0) is not None


async def test_the_server_gates_stay_shut_before_a_server_that_says_nothing() -> None:
    async def mute(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await nats_gate("127.0.0.1", port)(0) is None
    assert await valkey_gate("127.0.0.1", port)(0) is None
    server.close()
    await server.wait_closed()
    assert await nats_gate("127.0.0.1", port)(0) is None


async def test_the_embedded_servers_start_and_keep_what_they_were_told_across_a_kill(tmp_path: Path) -> None:
    nats_port, valkey_port = ports.free_port("127.0.0.1"), ports.free_port("127.0.0.1")
    supervisor = Supervisor([nats_spec(nats_port, tmp_path / "nats"), valkey_spec(valkey_port, tmp_path / "valkey")],
                            tmp_path / "logs", Console())
    await supervisor.start()
    try:
        url = f"redis://127.0.0.1:{valkey_port}/0"
        before = await RedisRegistry.connect(url, 5)
        key = await before.deployment_key()
        await before.close()
        valkey = supervisor.children[1]
        valkey.kill()
        async with asyncio.timeout(20):
            while valkey.restarts == 0 or valkey.state != "ready":
                await asyncio.sleep(0.05)
        after = await RedisRegistry.connect(url, 5)
        assert await after.deployment_key() == key
        await after.close()
    finally:
        await supervisor.stop()
