"""The store's client against nodes in this process: both byte paths, several nodes, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.block_hash import BlockHash
from common.bus import MemoryBus
from common.clients.kvstore import KvStoreClient
from common.clients.kvstore_runs import RUN_BLOCKS
from common.directory import Directory
from common.registry import MemoryRegistry
from common.service_host import Deps
from common.service_record import Fingerprint
from kvstore_svc.chain_index import Tier
from kvstore_svc.config import KvStoreConfig
from kvstore_svc.service import KvStoreService, build

NUM_BYTES = 4096
ROOT = bytes(16)
FINGERPRINT = Fingerprint("m", "r", "float32", 16, 2, 2, 16)


def chain(length: int) -> list[BlockHash]:
    return [os.urandom(16) for _ in range(length)]


def content(block_hash: BlockHash) -> bytes:
    return block_hash * (NUM_BYTES // 16)


class Fleet:
    """Nodes and clients that meet in memory. A client on `host` b shares no folder with the nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.registry = folder, MemoryRegistry()
        self.directory = Directory(self.registry, poll_s=0.05, grace_s=0.3)
        self.nodes: list[KvStoreService] = []
        self.clients: list[KvStoreClient] = []

    async def start_node(self, **changes: Any) -> KvStoreService:
        asked: dict[str, Any] = {"dram_bytes": 4 << 20, "sweep_interval_s": 0.05, "shm_dir": str(self.folder / "a")}
        node = build(KvStoreConfig(**asked | changes), Deps(MemoryBus(), self.registry))
        await node.start()
        self.nodes.append(node)
        await self.directory.refresh()
        return node

    def client(self, host: str = "a", **changes: Any) -> KvStoreClient:
        client = KvStoreClient(self.directory, self.folder / host, **changes)
        self.clients.append(client)
        return client

    async def kill(self, node: KvStoreService) -> None:
        """As SIGKILL: calls break, and the record stays for a while."""
        await node._host.server.stop(grace=None)

    async def put(self, client: KvStoreClient, hashes: list[BlockHash], first: int = 0, **how: Any) -> int:
        parts = hashes[first:]
        return await client.put(parts, hashes[first - 1] if first else ROOT, FINGERPRINT,
                                [memoryview(content(h)) for h in parts], **how)

    async def get(self, client: KvStoreClient, hashes: list[BlockHash], **how: Any) -> int:
        """How many blocks came; the counted ones are compared with what was put, in order."""
        seen: list[tuple[int, bytes]] = []
        count = await client.get(hashes, FINGERPRINT, lambda index, view: seen.append((index, bytes(view))), **how)
        assert seen[:count] == [(index, content(h)) for index, h in enumerate(hashes[:count])]
        return count

    def check(self) -> None:
        for node in self.nodes:
            assert node._parts is not None
            node._parts.pool.check()

    async def nothing_held(self) -> None:
        parts = self.pool()
        await until(lambda: not parts.pool.num_held(Tier.DRAM))
        assert parts.puts.num_open == parts.puts.num_quarantined == parts.store.num_leased == 0

    def pool(self, index: int = 0) -> Any:
        parts = self.nodes[index]._parts
        assert parts is not None
        return parts


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    await fleet.directory.start()
    yield fleet
    fleet.check()
    for client in fleet.clients:
        await client.close()
    await fleet.directory.stop()
    for node in fleet.nodes:
        await node.stop()
    assert not list((tmp_path / "a").iterdir()), "a segment or a liveness file is left"


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("host", ["a", "b"])
async def test_a_chain_goes_in_and_comes_out_on_both_paths(fleet: Fleet, host: str) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(host), chain(300)
    assert await client.lookup(hashes, FINGERPRINT) == 0
    assert await fleet.put(client, hashes) == 300
    assert await fleet.put(client, hashes) == 0
    assert await client.lookup(hashes, FINGERPRINT) == 300
    assert await fleet.get(client, hashes) == 300
    assert await fleet.get(client, hashes[100:]) == 200
    path, other = ("segment", "stream") if host == "a" else ("stream", "segment")
    assert client.counters.get_bytes == {path: 500 * NUM_BYTES, other: 0}
    assert client.counters.put_bytes == {path: 300 * NUM_BYTES, other: 0}
    assert client.counters.hits == {"dram": 500, "ssd": 0}
    parents = {block.key[16:]: block.parent[16:] for block in fleet.pool().pool.index}
    assert parents == dict(zip(hashes, [ROOT, *hashes], strict=False))


async def test_128_blocks_take_two_calls_and_each_byte_is_read_where_it_lies(fleet: Fleet) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(), chain(RUN_BLOCKS)
    await fleet.put(client, hashes)
    calls, copied = client.counters.num_rpcs, client.counters.get_bytes["segment"]
    segments = set()

    def sink(index: int, view: memoryview) -> None:
        segments.add(view.obj)  # the map itself: nothing was copied to get here

    assert await client.get(hashes, FINGERPRINT, sink) == RUN_BLOCKS
    await until(lambda: not client._ending)
    assert client.counters.num_rpcs - calls <= 2
    assert client.counters.get_bytes["segment"] - copied == RUN_BLOCKS * NUM_BYTES
    (node,) = client._nodes._nodes.values()
    (segment,) = node._segments.values()
    assert segments == {segment._map}
    assert fleet.pool().store.num_leased == 0


async def test_blocks_of_another_fingerprint_are_never_taken(fleet: Fleet) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(), chain(3)
    await fleet.put(client, hashes)
    other = Fingerprint("m", "r", "bfloat16", 16, 2, 2, 16)
    assert await client.lookup(hashes, other) == 0
    assert await client.get(hashes, other, lambda *_: None) == 0


async def test_without_a_store_everything_is_a_miss(fleet: Fleet) -> None:
    client, hashes = fleet.client(), chain(3)
    assert await client.lookup(hashes, FINGERPRINT) == 0
    assert await fleet.put(client, hashes) == await fleet.get(client, hashes) == 0
    assert await client.lookup([], FINGERPRINT) == await fleet.get(client, []) == await fleet.put(client, []) == 0
    (fleet.folder / "a").mkdir(exist_ok=True)


async def test_runs_spread_over_nodes_and_a_dead_node_costs_only_its_own(fleet: Fleet) -> None:
    for name in ("one", "two"):
        await fleet.start_node(service_id=name, dram_bytes=16 << 20)
    client = fleet.client()
    chains = [chain(RUN_BLOCKS * 2) for _ in range(8)]
    for hashes in chains:
        for first in range(0, len(hashes), 100):  # in parts, as a worker writes back
            assert await fleet.put(client, hashes[: first + 100], first) == len(hashes[first : first + 100])
        assert await client.lookup(hashes, FINGERPRINT) == len(hashes)
    stored = [fleet.pool(i).pool.index.num_blocks(Tier.DRAM) for i in range(2)]
    assert sum(stored) == 8 * 2 * RUN_BLOCKS
    assert all(count and count % RUN_BLOCKS == 0 for count in stored)
    reader = fleet.client()
    assert [await fleet.get(reader, hashes) for hashes in chains] == [2 * RUN_BLOCKS] * 8
    await fleet.kill(fleet.nodes[1])
    left = [await reader.lookup(hashes, FINGERPRINT) for hashes in chains]
    assert set(left) <= {0, RUN_BLOCKS, 2 * RUN_BLOCKS}
    assert 0 < sum(left) < sum(stored)
    assert [await fleet.get(reader, hashes) for hashes in chains] == left


async def test_a_node_that_dies_is_a_miss_at_once_and_its_next_life_serves_again(fleet: Fleet) -> None:
    node = await fleet.start_node(service_id="one")
    client, hashes = fleet.client(), chain(4)
    await fleet.put(client, hashes)
    await fleet.kill(node)
    assert await fleet.get(client, hashes) == await fleet.put(client, hashes) == 0
    assert await client.lookup(hashes, FINGERPRINT) == 0
    await fleet.start_node(service_id="one")
    assert await fleet.put(client, hashes) == 4
    assert await fleet.get(client, hashes) == 4
    assert len(client._nodes._nodes) == 1


@pytest.mark.parametrize("host", ["a", "b"])
async def test_a_flipped_byte_is_a_miss_before_any_sink_sees_it_and_the_key_is_free_again(
    fleet: Fleet, host: str
) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(host), chain(6)
    await fleet.put(client, hashes)
    parts = fleet.pool()
    block = next(b for b in parts.pool.index if b.key.endswith(hashes[2]))
    parts.store.view(block)[99] ^= 1
    seen: list[int] = []
    assert await client.get(hashes, FINGERPRINT, lambda index, _view: seen.append(index)) == 2
    assert seen == [0, 1]
    await until(lambda: not client._ending)
    assert await client.lookup(hashes, FINGERPRINT) == 2
    assert await fleet.put(client, hashes) == 1
    assert await fleet.get(client, hashes) == 6
    assert client.counters.num_corrupt == parts.mover.num_corrupt == 1


async def test_what_was_read_after_the_lease_had_ended_does_not_count(fleet: Fleet) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(lease_s=0.2), chain(4)
    await fleet.put(client, hashes)
    stalled = threading.Event()

    def sink(index: int, _view: memoryview) -> None:
        if index == 2:
            stalled.wait(0.4)

    assert await client.get(hashes, FINGERPRINT, sink) == 2
    assert fleet.pool().store.num_leased == 0


async def test_a_cancelled_get_returns_when_its_thread_no_longer_writes(fleet: Fleet) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(), chain(8)
    await fleet.put(client, hashes)
    entered, go_on, running = threading.Event(), threading.Event(), threading.Event()

    def sink(_index: int, _view: memoryview) -> None:
        running.set()
        entered.set()
        go_on.wait(5)
        running.clear()

    getting = asyncio.create_task(client.get(hashes, FINGERPRINT, sink))
    await asyncio.to_thread(entered.wait, 5)
    getting.cancel()
    await asyncio.sleep(0.05)
    getting.cancel()
    assert not getting.done()
    go_on.set()
    await asyncio.wait({getting})
    assert getting.cancelled()
    assert not running.is_set()
    await until(lambda: fleet.pool().store.num_leased == 0)


async def test_a_cancelled_put_stores_nothing_and_keeps_no_slot(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start_node()
    client, hashes = fleet.client(), chain(8)
    entered, go_on = threading.Event(), threading.Event()

    def stalled(*_args: Any) -> int:
        entered.set()
        go_on.wait(5)
        return 0

    monkeypatch.setattr("common.clients.kvstore_paths.copy_with_checksum", stalled)
    putting = asyncio.create_task(fleet.put(client, hashes))
    await asyncio.to_thread(entered.wait, 5)
    putting.cancel()
    await asyncio.sleep(0.05)
    assert not putting.done()  # the thread still reads the views
    go_on.set()
    await asyncio.wait({putting})
    assert putting.cancelled()
    await fleet.nothing_held()
    assert await client.lookup(hashes, FINGERPRINT) == 0


async def test_bytes_that_were_broken_on_the_way_are_refused_and_keep_no_slot(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.start_node()
    client, hashes = fleet.client("b"), chain(8)
    monkeypatch.setattr("kvstore_svc.store.checksum", lambda _payload: -1)
    assert await fleet.put(client, hashes) == 0
    await fleet.nothing_held()
    assert await client.lookup(hashes, FINGERPRINT) == 0


async def test_a_run_larger_than_one_lease_or_grant_goes_in_and_out_in_several(fleet: Fleet) -> None:
    await fleet.start_node(dram_bytes=1 << 20, max_leased_fraction=0.1, max_put_fraction=0.1)
    client, hashes = fleet.client(), chain(100)
    assert await fleet.put(client, hashes) == 100
    assert await fleet.get(client, hashes) == 100


async def test_concurrent_readers_and_writers_get_right_bytes_only(fleet: Fleet) -> None:
    node = await fleet.start_node(
        dram_bytes=1 << 20, ssd_path=str(fleet.folder / "x.ssd"), ssd_bytes=2 << 20, slab_bytes=1 << 16)
    chains = [chain(40) for _ in range(16)]
    clients = [fleet.client(host) for host in "aab"]

    async def work(number: int) -> int:
        got = 0
        for step in range(12):
            hashes = chains[(number * 5 + step * 3) % len(chains)]
            await fleet.put(clients[number], hashes)
            got += await fleet.get(clients[number], hashes)
        return got

    assert all(await asyncio.gather(*(work(number) for number in range(3))))
    await node.drain()
    parts = fleet.pool()
    await until(lambda: not any(client._ending for client in clients))
    assert parts.store.num_leased == parts.puts.num_open == parts.pool.num_held(Tier.DRAM) == 0
    assert parts.mover.num_corrupt == 0
