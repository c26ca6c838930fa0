"""A store node as a process of its own that is killed, stopped and started again, and writers that die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from common.block_hash import BlockHash
from common.clients.kvstore import KvStoreClient
from common.directory import Directory
from common.registry import RedisRegistry
from kvstore_svc.disk_format import PAGE
from stack.scrape import samples
from tests.kvstore_writer import FINGERPRINT, NUM_BYTES
from tests.servers import RealServer

ROOT = bytes(16)
NODE = "store-0"


def chain(length: int, seed: int) -> list[BlockHash]:
    rng = random.Random(seed)
    return [rng.randbytes(16) for _ in range(length)]


def content(block_hash: BlockHash) -> bytes:
    return block_hash * (NUM_BYTES // 16)


class Node:
    """One store process after the other, under one name, and a client in this process."""

    def __init__(self, folder: Path, nats: RealServer, valkey: RealServer) -> None:
        self.folder, self._nats, self._valkey = folder, nats, valkey
        self.shm_dir, self.ssd = folder / "shm", folder / "tier.ssd"
        self.process: asyncio.subprocess.Process | None = None
        self.dram_bytes, self.ssd_bytes = 1 << 20, 8 << 20

    async def open(self) -> None:
        self.registry = await RedisRegistry.connect(self._valkey.url, 10)
        self.directory = Directory(self.registry, poll_s=0.05)
        await self.directory.start()
        self.client = KvStoreClient(self.directory, self.shm_dir)

    async def close(self) -> None:
        await self.client.close()
        await self.kill()
        await self.directory.stop()
        await self.registry.close()

    async def spawn(self, name: str = NODE) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore_svc", "--service-id", name, "--dram-bytes", str(self.dram_bytes),
            "--ssd-path", str(self.ssd), "--ssd-bytes", str(self.ssd_bytes), "--slab-bytes", str(1 << 16),
            "--shm-dir", str(self.shm_dir), "--nats-url", self._nats.url, "--redis-url", self._valkey.url,
            "--sweep-interval-s", "0.05", "--lease-ttl-s", "2", stderr=asyncio.subprocess.PIPE)

    async def start(self) -> None:
        before = self.incarnation
        self.process = await self.spawn()
        self._draining = asyncio.create_task(self.process.stderr.read())  # type: ignore[union-attr]
        await until(lambda: self.incarnation not in ("", before), 30)

    async def kill(self, number: int = signal.SIGKILL) -> int:
        if self.process is None:
            return 0
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), 20)
        self.process = None
        return code

    @property
    def incarnation(self) -> str:
        record = self.directory.get("kvstore", NODE)
        return record.incarnation if record is not None and record.state == "ready" else ""

    def metric(self, name: str, **labels: str) -> float:
        record = self.directory.get("kvstore", NODE)
        assert record is not None
        return sum(s.value for s in samples(record.metrics_address) if s.name == f"shoal_kvstore_{name}" and (
            labels.items() <= s.labels.items()))

    async def put(self, hashes: list[BlockHash]) -> int:
        return await self.client.put(hashes, ROOT, FINGERPRINT, [memoryview(content(h)) for h in hashes])

    async def get(self, hashes: list[BlockHash]) -> int:
        seen: list[bytes] = []
        count = await self.client.get(hashes, FINGERPRINT, lambda _index, view: seen.append(bytes(view)))
        assert seen[:count] == [content(h) for h in hashes[:count]], "wrong bytes"
        return count

    async def writer(self, name: str, hashes: list[BlockHash], lease_s: float) -> asyncio.subprocess.Process:
        record = self.directory.get("kvstore", NODE)
        assert record is not None
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.kvstore_writer", record.address, str(self.shm_dir), name, str(lease_s),
            b"".join(hashes).hex(), ROOT.hex(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 30) == b"began\n"
        return process


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def node(tmp_path: Path, nats: RealServer, valkey: RealServer) -> AsyncIterator[Node]:
    node = Node(tmp_path, nats, valkey)
    await node.open()
    await node.start()
    yield node
    await node.close()


async def test_a_writer_killed_in_the_middle_blocks_no_key_and_leaves_no_byte(node: Node) -> None:
    hashes = chain(4, 1)
    writer = await node.writer("dies", hashes, lease_s=0.3)
    assert await node.get(hashes) == 0
    writer.kill()
    await writer.wait()
    assert await node.put(hashes) == 4  # at once, though the dead one's lease still runs
    assert await node.get(hashes) == 4
    await until(lambda: node.metric("expired_puts_total") == 1)
    assert node.metric("quarantined_blocks") == node.metric("open_puts") == 0


async def test_a_stopped_writer_that_goes_on_late_hurts_no_block(node: Node) -> None:
    """Its slots are kept from everyone else for as long as it could still write into them."""
    hashes = chain(4, 1)
    writer = await node.writer("stops", hashes, lease_s=0.2)
    os.kill(writer.pid, signal.SIGSTOP)
    await until(lambda: node.metric("quarantined_blocks") == 4)
    assert await node.put(hashes) == 4
    others = [chain(60, seed) for seed in range(10, 18)]  # twice the DRAM: every slot but the four changes hands
    for other in others:
        assert await node.put(other) == 60
    writer.send_signal(signal.SIGCONT)
    said, _ = await asyncio.wait_for(writer.communicate(b"go on\n"), 10)
    assert said == b"refused: not_found\n"
    assert [await node.get(other) for other in (hashes, *others)] == [4] + [60] * 8
    assert node.metric("quarantined_blocks") == node.metric("corrupt_blocks_total") == 0


async def test_a_node_that_was_asked_to_stop_serves_everything_from_ssd_in_its_next_life(node: Node) -> None:
    chains = [chain(100, seed) for seed in range(3)]
    for hashes in chains:
        assert await node.put(hashes) == 100
    assert await node.kill(signal.SIGTERM) == 0
    assert not [path for path in node.shm_dir.iterdir() if path.suffix == ".segment"]
    await node.start()
    assert [await node.get(hashes) for hashes in chains] == [100] * 3
    assert node.metric("hits_total", tier="ssd") == 300
    assert node.client.counters.hits["ssd"] == 300


@pytest.mark.parametrize("seed", range(3))
async def test_a_node_killed_while_it_moves_blocks_to_ssd_loses_none_that_were_there(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    first = chain(100, 100)
    assert await node.put(first) == 100
    await until(lambda: node.metric("blocks", tier="ssd") == 100)
    chains = [chain(60, seed) for seed in range(200, 212)]

    async def put_all() -> None:
        for hashes in chains:
            await node.put(hashes)

    putting = asyncio.create_task(put_all())
    await asyncio.sleep(rng.uniform(0, 0.3))
    on_ssd = node.metric("blocks", tier="ssd")
    await node.kill()
    await putting
    await node.start()
    assert await node.get(first) == 100
    found = [await node.get(hashes) for hashes in chains]
    assert 100 + sum(found) >= on_ssd
    assert node.metric("corrupt_blocks_total") == 0
    for hashes, count in zip(chains, found, strict=True):
        assert await node.put(hashes) == 60 - count
        assert await node.get(hashes) == 60


async def test_a_flipped_byte_on_disk_is_a_miss_and_never_wrong_bytes(node: Node) -> None:
    hashes = chain(20, 1)
    await node.put(hashes)
    assert await node.kill(signal.SIGTERM) == 0
    raw = bytearray(node.ssd.read_bytes())
    at = raw.index(content(hashes[7]))
    assert at > PAGE
    raw[at + 1234] ^= 1
    node.ssd.write_bytes(raw)
    await node.start()
    assert await node.get(hashes) == 7
    assert node.metric("corrupt_blocks_total") == 1
    assert await node.put(hashes) == 1
    assert await node.get(hashes) == 20


async def test_a_killed_node_is_a_miss_and_its_memory_is_taken_away_by_the_next(node: Node) -> None:
    hashes = chain(20, 1)
    await node.put(hashes)
    (old,) = node.shm_dir.glob("*.segment")
    os.kill(node.process.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    assert await node.client.lookup(hashes, FINGERPRINT, timeout_s=0.3) == 0
    assert await node.client.lookup(hashes, FINGERPRINT, timeout_s=60) == 0  # not asked again for a while
    await node.kill()
    await node.start()
    assert not old.exists()
    await node.put(hashes)
    assert await node.get(hashes) == 20


async def test_a_second_node_on_the_same_file_does_not_start_and_says_why(node: Node) -> None:
    second = await node.spawn("store-1")
    _, said = await asyncio.wait_for(second.communicate(), 30)
    assert second.returncode == 2
    assert b"is in use by another process" in said.splitlines()[-1]
