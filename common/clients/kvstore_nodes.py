"""The live store nodes: which one holds a run of a chain, a channel and the opened segments of each.

A `StoreNode`'s life: made at its first use → used ⇄ failed (left alone for a while; what it holds is a miss, and is
not looked for elsewhere) → retired (its record is gone, or a new incarnation came: calls that run on it may end, then
channel and segments are closed).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Final

import grpc.aio

from common.block_hash import BlockHash
from common.blocks.segment import Segment
from common.clients.channels import ChannelPool
from common.directory import Directory
from common.service_record import ServiceRecord
from proto import kvstore_pb2_grpc

SERVICE: Final = "kvstore"
FAILED_S: Final = 2.0  # a node that did not answer is left alone for this long
RETIRE_S: Final = 15.0  # longer than any call takes


class StoreNode:
    """One process life of a store."""

    def __init__(self, service_id: str, channel: grpc.aio.Channel, shm_dir: Path, same_host: bool) -> None:
        self.service_id, self.same_host = service_id, same_host
        self._shm_dir, self._failed_at = shm_dir, float("-inf")
        self._channel = channel
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._segments: dict[str, Segment] = {}  # a store life has one

    @property
    def healthy(self) -> bool:
        return time.monotonic() - self._failed_at >= FAILED_S

    def mark_failed(self) -> None:
        self._failed_at = time.monotonic()

    def segment(self, name: str) -> Segment:
        """Mapped at its first use. Raises `OSError` when it is gone."""
        name = Path(name).name
        if name not in self._segments:
            self._segments[name] = Segment.open(self._shm_dir / name)
        return self._segments[name]

    async def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        await self._channel.close()


class StoreNodes:
    """Rendezvous hashing over the nodes that the directory lists: each gets an even share, and keeps it."""

    def __init__(
        self, directory: Directory, shm_dir: Path, host_id: str, channels: ChannelPool | None = None
    ) -> None:
        self._channels = channels or ChannelPool()
        self._directory, self._shm_dir, self._host_id = directory, shm_dir, host_id
        self._nodes: dict[tuple[str, str], StoreNode] = {}  # (service_id, incarnation); bounded by the directory
        self._retiring: set[asyncio.Task[None]] = set()

    def of(self, head: BlockHash) -> StoreNode | None:
        """The node for the run of blocks that begins with `head`; None while it has failed, or without any node."""
        self._retire_gone()
        records = self._directory.records(SERVICE)
        if not records:
            return None
        node = self._node(max(records, key=lambda record: _weight(record.service_id, head)))
        return node if node.healthy else None

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for node in self._nodes.values():
            await node.close()
        self._nodes.clear()

    def _node(self, record: ServiceRecord) -> StoreNode:
        key = (record.service_id, record.incarnation)
        if key not in self._nodes:
            same_host = bool(record.host_id) and record.host_id == self._host_id
            self._nodes[key] = StoreNode(
                record.service_id, self._channels.open(record.address), self._shm_dir, same_host)
        return self._nodes[key]

    def _retire_gone(self) -> None:
        listed = {(record.service_id, record.incarnation) for record in self._directory.all(SERVICE)}
        for key in self._nodes.keys() - listed:
            task = asyncio.create_task(_close_later(self._nodes.pop(key)))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)


async def _close_later(node: StoreNode) -> None:
    try:
        await asyncio.sleep(RETIRE_S)
    finally:
        await node.close()


def _weight(service_id: str, head: BlockHash) -> bytes:
    return hashlib.blake2b(head + service_id.encode(), digest_size=8).digest()
