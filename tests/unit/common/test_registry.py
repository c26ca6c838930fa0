from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest

from common.directory import Directory
from common.errors import FingerprintMismatch, Unavailable
from common.registry import MemoryRegistry, RedisRegistry
from common.service_record import Fingerprint, ServiceRecord
from tests.servers import RealServer

PRINT = Fingerprint("m", "r1", "float32", 16, 2, 1, 8)


def record(service_id: str = "decode-0", incarnation: str = "a", **changes: object) -> ServiceRecord:
    base = ServiceRecord("decode", service_id, incarnation, "127.0.0.1:1", models=("m",), fingerprint=PRINT,
                         capacity={"num_blocks": 4}, started_at_unix_s=100.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_a_record_survives_the_wire_and_drops_fields_of_a_newer_version() -> None:
    text = record().to_json().replace("{", '{"invented_later":1,', 1)
    assert ServiceRecord.from_json(text) == record()


async def test_a_registered_service_is_listed_until_released(valkey: RealServer) -> None:
    registry = await RedisRegistry.connect(valkey.url, 5)
    lease = await registry.register(record(), ttl_s=5)
    assert [r.service_id for r in await registry.list()] == ["decode-0"]
    await lease.update(state="draining")
    assert (await registry.list())[0].state == "draining"
    await lease.release()
    assert await registry.list() == []
    await registry.close()


async def test_a_lease_expires_without_heartbeats_and_comes_back_with_the_next_number(valkey: RealServer) -> None:
    registry = await RedisRegistry.connect(valkey.url, 5)
    lease = await registry.register(record(), ttl_s=1)
    await registry.erase(lease.record)  # what an expiry does
    deadline = time.monotonic() + 5
    while not await registry.list() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert lease.record.lease == 2
    assert lease.record.incarnation == "a"
    await lease.release()
    await registry.close()


async def test_a_worker_with_another_fingerprint_is_refused_with_both_values(valkey: RealServer) -> None:
    registry = await RedisRegistry.connect(valkey.url, 5)
    lease = await registry.register(record(), ttl_s=5)
    other = record("decode-1", fingerprint=dataclasses.replace(PRINT, block_size=32))
    with pytest.raises(FingerprintMismatch, match=r"block_size=16.*block_size=32"):
        await registry.register(other, ttl_s=5)
    same_elsewhere = record("decode-2", fingerprint=dataclasses.replace(PRINT, model="n", block_size=32))
    await (await registry.register(same_elsewhere, ttl_s=5)).release()
    await lease.release()
    await registry.close()


async def test_a_newer_life_of_an_id_fences_the_older_one(valkey: RealServer) -> None:
    registry = await RedisRegistry.connect(valkey.url, 5)
    old = await registry.register(record(), ttl_s=5)
    new = await registry.register(record(incarnation="b", started_at_unix_s=200.0), ttl_s=5)
    await old.update(state="draining")  # a zombie's heartbeat
    assert [(r.incarnation, r.state) for r in await registry.list()] == [("b", "ready")]
    await old.release()
    assert len(await registry.list()) == 1
    await new.release()
    await registry.close()


async def test_the_deployment_key_is_drawn_once_and_survives_a_redis_that_forgot_it(valkey: RealServer) -> None:
    registries = [await RedisRegistry.connect(valkey.url, 5) for _ in range(2)]
    keys = {await r.deployment_key() for r in registries}
    assert len(keys) == 1
    lease = await registries[0].register(record(), ttl_s=1)
    await registries[1]._client.flushall()
    await asyncio.sleep(0.5)  # one heartbeat
    second = await RedisRegistry.connect(valkey.url, 5)
    assert {await second.deployment_key()} == keys
    await lease.release()
    for r in (*registries, second):
        await r.close()


async def test_a_lease_outlives_a_killed_valkey_and_the_directory_keeps_what_it_knew(valkey: RealServer) -> None:
    registry = await RedisRegistry.connect(valkey.url, 5)
    lease = await registry.register(record(), ttl_s=1)
    directory = Directory(registry, poll_s=0.05, grace_s=2.0)
    await directory.start()
    valkey.kill()
    await asyncio.sleep(1.5)  # longer than the TTL
    assert not directory.reachable
    assert [r.service_id for r in directory.records("decode", "m")] == ["decode-0"]
    valkey.start()
    deadline = time.monotonic() + 10
    while not directory.reachable and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    assert [r.service_id for r in directory.records("decode", "m")] == ["decode-0"]
    assert [r.service_id for r in await registry.list()] == ["decode-0"]
    await directory.stop()
    await lease.release()
    await registry.close()


async def test_an_unreachable_redis_is_one_clear_line() -> None:
    with pytest.raises(Unavailable, match=r"Redis at 127.0.0.1:1/0 is not reachable within 0.3 s"):
        await RedisRegistry.connect("redis://user:secret@127.0.0.1:1/0", 0.3)


async def test_the_directory_drops_a_missing_record_only_after_its_grace_and_a_draining_one_at_once() -> None:
    registry = MemoryRegistry()
    await registry.register(record("decode-0"), 5)
    draining = await registry.register(record("decode-1"), 5)
    directory = Directory(registry, grace_s=0.2)
    await directory.refresh()
    await draining.update(state="draining")
    await directory.refresh()
    assert [r.service_id for r in directory.records("decode")] == ["decode-0"]
    registry.records.clear()
    await directory.refresh()
    assert directory.get("decode", "decode-1") is None
    assert directory.get("decode", "decode-0") is not None
    await asyncio.sleep(0.25)
    await directory.refresh()
    assert directory.get("decode", "decode-0") is None


async def test_the_directory_takes_a_new_incarnation_at_once() -> None:
    registry = MemoryRegistry()
    await registry.register(record(), 5)
    directory = Directory(registry)
    await directory.refresh()
    waiting = asyncio.create_task(directory.changed(5))
    await asyncio.sleep(0)
    await registry.register(record(incarnation="b"), 5)
    await directory.refresh()
    await asyncio.wait_for(waiting, 1)
    found = directory.get("decode", "decode-0")
    assert found is not None
    assert found.incarnation == "b"
