"""How block bytes get from a store node to the caller and back: its segment on the same host, a stream elsewhere.

Every function works in a worker thread for as long as it touches the caller's memory, and when its task is cancelled,
waits for that thread to stop between two blocks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import grpc.aio

from common.block_hash import BlockHash
from common.blocks.checksum import checksum, copy_with_checksum
from common.clients.kvstore_nodes import StoreNode
from common.errors import ShoalError
from proto import kvstore_pb2

Result = TypeVar("Result")
Sink = Callable[[int, memoryview], None]

SEGMENT: Final = "segment"
STREAM: Final = "stream"
_TIERS: Final = {kvstore_pb2.TIER_HOST: "dram", kvstore_pb2.TIER_DISK: "ssd"}


@dataclass(slots=True)
class Counters:
    """What this client has done. Bytes by path: `segment` or `stream`; blocks got by tier: `dram` or `ssd`."""

    num_rpcs: int = 0
    get_bytes: dict[str, int] = field(default_factory=lambda: {SEGMENT: 0, STREAM: 0})
    put_bytes: dict[str, int] = field(default_factory=lambda: {SEGMENT: 0, STREAM: 0})
    hits: dict[str, int] = field(default_factory=lambda: {"dram": 0, "ssd": 0})
    num_corrupt: int = 0
    get_s_per_block: float = 0.0  # moving mean over gets that brought blocks; 0 = unknown

    def note_get(self, seconds: float, num_blocks: int) -> None:
        if num_blocks:
            now = seconds / num_blocks
            self.get_s_per_block = now if not self.get_s_per_block else 0.8 * self.get_s_per_block + 0.2 * now


class BlockPaths:
    """The worker threads of one client and the four ways through them."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvstore-bytes")

    def close(self) -> None:
        self._threads.shutdown(wait=True)

    async def read_segment(
        self, node: StoreNode, answer: kvstore_pb2.GetResponse, first: int, sink: Sink, until: float,
        corrupt: list[BlockHash],
    ) -> int:
        """Hand out leased blocks as views of the segment; `until` (monotonic) is when the lease ends."""
        segment = node.segment(answer.segment)

        def work(stop: threading.Event) -> int:
            for index, slot in enumerate(answer.slots):
                view = segment.view(slot.offset, slot.num_bytes)
                if stop.is_set() or not self._checked(slot, view, corrupt):
                    return index
                sink(first + index, view)
                if time.monotonic() >= until:
                    return index  # the slot may have been given away while the sink was reading
                self._note(slot, SEGMENT)
            return len(answer.slots)

        return await self._in_thread(work)

    async def read_stream(
        self, node: StoreNode, answer: kvstore_pb2.GetResponse, first: int, sink: Sink, until: float,
        corrupt: list[BlockHash],
    ) -> int:
        """Hand out blocks as they arrive; their bytes are this process's own."""
        num_read = 0
        self._counters.num_rpcs += 1
        call = node.stub.Read(kvstore_pb2.ReadRequest(lease_id=answer.lease_id), timeout=_left(until))
        try:
            async for block in call:
                if num_read == len(answer.slots):
                    break
                slot, index, view = answer.slots[num_read], first + num_read, memoryview(block.payload)

                def work(stop: threading.Event, slot: Any = slot, index: int = index, view: memoryview = view) -> bool:
                    if not self._checked(slot, view, corrupt):
                        return False
                    sink(index, view)
                    return True

                if not await self._in_thread(work):
                    break
                self._note(slot, STREAM)
                num_read += 1
        except (grpc.aio.AioRpcError, ShoalError):
            node.mark_failed()
        finally:
            call.cancel()
        return num_read

    async def write_segment(
        self, node: StoreNode, answer: kvstore_pb2.BeginPutResponse, views: Sequence[memoryview], until: float
    ) -> list[int]:
        """Copy the absent blocks into their slots; returns the checksums of those that were done in time."""
        segment = node.segment(answer.segment)

        def work(stop: threading.Event) -> list[int]:
            done: list[int] = []
            for slot, source in zip(answer.slots, views, strict=False):
                if slot.present:
                    continue
                if stop.is_set() or time.monotonic() >= until:
                    break
                done.append(copy_with_checksum(segment.view(slot.offset, slot.num_bytes), source))
                self._counters.put_bytes[SEGMENT] += slot.num_bytes
            return done

        return await self._in_thread(work)

    async def write_stream(
        self, node: StoreNode, answer: kvstore_pb2.BeginPutResponse, views: Sequence[memoryview], until: float
    ) -> int:
        """Send the absent blocks; the store commits them at the end of the stream."""
        async def blocks() -> AsyncIterator[kvstore_pb2.BlockBytes]:
            for slot, source in zip(answer.slots, views, strict=False):
                if slot.present:
                    continue
                payload = bytes(source)
                self._counters.put_bytes[STREAM] += len(payload)
                yield kvstore_pb2.BlockBytes(
                    put_id=answer.put_id, fence=answer.fence, block_hash=slot.block_hash, payload=payload,
                    checksum=checksum(payload))

        self._counters.num_rpcs += 1
        committed = await node.stub.Write(blocks(), timeout=_left(until))
        return int(committed.num_committed)

    def _checked(self, slot: kvstore_pb2.BlockSlot, view: memoryview, corrupt: list[BlockHash]) -> bool:
        if view.nbytes == slot.num_bytes and checksum(view) == slot.checksum:
            return True
        corrupt.append(slot.block_hash)
        self._counters.num_corrupt += 1
        return False

    def _note(self, slot: kvstore_pb2.BlockSlot, path: str) -> None:
        self._counters.get_bytes[path] += slot.num_bytes
        tier = _TIERS[slot.tier]
        self._counters.hits[tier] += 1

    async def _in_thread(self, work: Callable[[threading.Event], Result]) -> Result:
        stop = threading.Event()
        working = asyncio.get_running_loop().run_in_executor(self._threads, work, stop)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            stop.set()
            while not working.done():  # however often we are cancelled: the thread may still write
                try:
                    await asyncio.wait({working})
                except asyncio.CancelledError:
                    continue
            if not working.cancelled():
                working.exception()
            raise


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.001)
