"""How fast KV moves on this host, beside a plain copy of the same blocks: store put and get, hand-off both ways.

All real: a store process, a receiver process, the workers' own clients, and this process as the worker that sends. A
round measures each way once, with a copy of the same blocks in this process just before it; a figure is the median of
the rounds, and so is its peer. Memory that is touched for the first time is slow to get on any way, so it has a figure
of its own: workers and stores keep and reuse theirs.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import uvloop
from rich.progress import Progress

from bench.bulk_engine import BLOCK_BYTES, BulkRunner
from bench.figures import Figure
from bench.kv_sender import KvSender
from bench.kv_store import MeasuredStore
from bench.leashed import Leashed
from common.block_hash import BlockHash
from common.blocks.checksum import checksum
from common.blocks.copy import copy_blocks
from common.blocks.host_id import default_shm_dir
from common.errors import InternalError
from common.hand_off import GRPC, SHM

_NUM_BLOCKS: Final = 256  # 180 MiB: the KV of 4,096 tokens
_WARM_UP: Final = 3  # rounds, until all memory of every way has been used
_MUST: Final = 0.4  # of the copy, on the ways through shared memory
PUT, GET, FIRST = "store put", "store get", "store put, new memory"
HAND_OFF: Final = {SHM: "hand-off, shared memory", GRPC: "hand-off, gRPC"}


def measure(*, quick: bool) -> list[Figure]:
    """`quick` takes fewer rounds, not other ones."""
    return uvloop.run(_measure(9 if quick else 30))


class _Ways:
    """Every way once: `seconds` by figure, of the way and of the copy just before it."""

    def __init__(self, store: MeasuredStore, sender: KvSender, receiver: Leashed) -> None:
        self._store, self._receiver = store, receiver
        runner = BulkRunner(_NUM_BLOCKS, seed=None)
        self._sources = [sender.engine.block_view(block_id) for block_id in range(_NUM_BLOCKS)]
        self._targets = [runner.block_view(block_id) for block_id in range(_NUM_BLOCKS)]
        self._hashes: list[BlockHash] = []
        self._sum = sum(map(checksum, self._sources))
        self.seconds: dict[str, list[tuple[float, float]]] = {}

    async def once(self, put: str = PUT) -> None:
        await self._time(put, self._put)
        await self._time(GET, self._get)
        for transport, name in HAND_OFF.items():
            await self._time(name, partial(self._hand_off, transport))

    async def _time(self, name: str, way: Callable[[], Awaitable[float]]) -> None:
        copied = copy_blocks(list(zip(self._targets, self._sources, strict=True)))
        self.seconds.setdefault(name, []).append((await way(), copied))

    async def _put(self) -> float:
        seconds, self._hashes = await self._store.put(self._sources)
        return seconds

    async def _get(self) -> float:
        for target in self._targets:
            target[:8] = bytes(8)
        seconds = await self._store.get(self._hashes, self._targets)
        self._require(sum(map(checksum, self._targets)))
        return seconds

    async def _hand_off(self, transport: str) -> float:
        seconds, content = (await self._receiver.ask(transport)).split()
        self._require(int(content))
        return float(seconds)

    def _require(self, content: int) -> None:
        if content != self._sum:
            raise InternalError("the blocks that came are not those that went")


async def _measure(num_rounds: int) -> list[Figure]:
    default_shm_dir().mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, \
            tempfile.TemporaryDirectory(prefix="bench-", dir=default_shm_dir()) as shm, Progress(transient=True) as bar:
        task = bar.add_task("kv", total=_WARM_UP + num_rounds)
        store, sender = MeasuredStore(Path(folder), Path(shm)), KvSender(_NUM_BLOCKS + 2, Path(shm))
        receiver: Leashed | None = None
        try:
            await asyncio.gather(store.start(), sender.start())
            argv = (sys.executable, "-m", "bench.kv_receiver", shm, sender.address, str(_NUM_BLOCKS))
            receiver = await Leashed.start(argv, Path(folder) / "receiver.log", talks=True)
            await receiver.ask("")
            ways = _Ways(store, sender, receiver)
            for turn in range(_WARM_UP + num_rounds):
                if turn == _WARM_UP:
                    ways.seconds = {FIRST: ways.seconds[FIRST]}
                await ways.once(PUT if turn else FIRST)
                bar.advance(task)
        finally:
            if receiver is not None:
                await receiver.stop()
            await sender.stop()
            await store.stop()
    return figures(ways.seconds)


def figures(seconds: dict[str, list[tuple[float, float]]]) -> list[Figure]:
    """From the (way, copy) seconds of each round; the demand is on the ways through shared memory."""
    made = []
    for name in (PUT, GET, HAND_OFF[SHM], HAND_OFF[GRPC], FIRST):
        value, copied = (_NUM_BLOCKS * BLOCK_BYTES / statistics.median(column) / 1e9
                         for column in zip(*seconds[name], strict=True))
        must = _MUST if name in (PUT, GET, HAND_OFF[SHM]) else None
        made.append(Figure(name, value, "GB/s", "memcpy", copied, value / copied, must))
    return made
