"""A store node in a process of its own, DRAM tier alone, and this process as a worker that uses it."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from bench.bulk_engine import FINGERPRINT
from bench.leashed import Leashed
from common import rpc
from common.block_hash import HASH_BYTES, BlockHash
from common.clients.kvstore import KvStoreClient
from common.clients.kvstore_paths import SEGMENT
from common.directory import Directory
from common.errors import InternalError, Unavailable
from common.registry import RedisRegistry
from proto import kvstore_pb2, kvstore_pb2_grpc
from stack.ports import free_port
from stack.servers import nats_spec, valkey_spec

_DRAM_BYTES: Final = 1 << 30  # a quarter of it is the most that one writer may have open
_START_S: Final = 30.0


class MeasuredStore:
    """`start`, then `put` and `get`, each a whole chain in one batch, then `stop`."""

    def __init__(self, folder: Path, shm_dir: Path) -> None:
        self._folder, self._shm_dir = folder, shm_dir
        self._processes: list[Leashed] = []
        self._registry: RedisRegistry | None = None

    async def start(self) -> None:
        nats, valkey = free_port("127.0.0.1"), free_port("127.0.0.1")
        nats_url, redis_url = f"nats://127.0.0.1:{nats}", f"redis://127.0.0.1:{valkey}/0"
        for name, argv in (
            ("nats", nats_spec(nats, self._folder / "nats").argv),
            ("valkey", valkey_spec(valkey, self._folder / "valkey").argv),
            ("kvstore", (sys.executable, "-m", "kvstore_svc", "--nats-url", nats_url, "--redis-url", redis_url,
                         "--shm-dir", str(self._shm_dir), "--dram-bytes", str(_DRAM_BYTES))),
        ):
            self._processes.append(await Leashed.start(argv, self._folder / f"{name}.log"))
        self._registry = await RedisRegistry.connect(redis_url, _START_S)
        self._directory = Directory(self._registry, poll_s=0.1)
        await self._directory.start()
        deadline = time.monotonic() + _START_S
        while not self._directory.records("kvstore"):
            if time.monotonic() > deadline:
                log = (self._folder / "kvstore.log").read_text()
                raise Unavailable(f"no store after {_START_S:g} s:\n{log[-2000:]}")
            await asyncio.sleep(0.05)
        self._client = KvStoreClient(self._directory, self._shm_dir)
        self._channel = rpc.open_channel(self._directory.records("kvstore")[0].address)
        self._stub = kvstore_pb2_grpc.KvStoreStub(self._channel)

    async def stop(self) -> None:
        if self._registry is not None:
            await self._client.close()
            await self._channel.close()
            await self._directory.stop()
            await self._registry.close()
        for process in reversed(self._processes):
            await process.stop()

    async def put(self, views: Sequence[memoryview]) -> tuple[float, list[BlockHash]]:
        """Seconds, and the chain's hashes. The store is emptied first, so its memory is used again."""
        await self._stub.Evict(kvstore_pb2.EvictRequest())
        hashes = [secrets.token_bytes(HASH_BYTES) for _ in views]
        started = time.perf_counter()
        written = await self._client.put(hashes, bytes(HASH_BYTES), FINGERPRINT, views)
        seconds = time.perf_counter() - started
        if written != len(views):
            raise InternalError(f"{written} of {len(views)} blocks were stored")
        return seconds, hashes

    async def get(self, hashes: Sequence[BlockHash], targets: Sequence[memoryview]) -> float:
        """Seconds until all blocks, checksums verified, are in `targets`."""
        into = [np.frombuffer(target, np.uint8) for target in targets]
        started = time.perf_counter()
        good = await self._client.get(
            hashes, FINGERPRINT, lambda index, view: np.copyto(into[index], np.frombuffer(view, np.uint8)))
        seconds = time.perf_counter() - started
        if good != len(hashes) or self._client.counters.get_bytes[SEGMENT] == 0:
            raise InternalError(f"{good} of {len(hashes)} blocks came from the store's memory")
        return seconds
