"""The KV store as workers see it: chains of blocks in and out, never an error, at worst a miss.

A get, for each run of 128 blocks: Get (leases the longest present prefix) → each block in order: checksum, then `sink`,
then "was the lease still held?" → Release. A block counts only when all three hold, so what a late or stopped
reader copied is never taken for good. A put: BeginPut (slots for the absent blocks) → copy and checksum → CommitPut.
Bytes go through the store's memory-mapped segment on its own host, else as a gRPC byte stream.

Runs are aligned to the chain's start, and a run lives on one node (rendezvous hashing of its first hash), so a run's
blocks live and are evicted together. A cancelled call returns only when no thread touches the caller's memory any more.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from common import logs
from common.block_hash import BlockHash
from common.blocks.host_id import host_id, open_shm_dir
from common.blocks.liveness import Liveness
from common.clients.channels import ChannelPool
from common.clients.fingerprint import fingerprint_to_proto
from common.clients.kvstore_nodes import StoreNode, StoreNodes
from common.clients.kvstore_paths import BlockPaths, Counters, Sink
from common.clients.kvstore_runs import ChainRuns
from common.directory import Directory
from common.errors import DeadlineExceeded, ShoalError, Unavailable
from common.service_record import Fingerprint
from proto import kvstore_pb2

log = logs.get(__name__)

LOOKUP_TIMEOUT_S: Final = 1.0
TIMEOUT_S: Final = 5.0
LEASE_S: Final = 10.0


class KvStoreClient:
    """Ready when made; `close` once. The directory is started and stopped by its owner.

    `client_id` names this process life; drawn at random when empty. While it lives, the store grants the slots of an
    unfinished put of it to nobody else.
    """

    def __init__(
        self, directory: Directory, shm_dir: str | Path, client_id: str = "", channels: ChannelPool | None = None, *,
        timeout_s: float = TIMEOUT_S, lease_s: float = LEASE_S,
    ) -> None:
        folder = open_shm_dir(shm_dir)
        self._client_id = client_id or f"kv-{secrets.token_hex(8)}"
        self._liveness = Liveness.hold(folder, self._client_id)
        self._nodes, self._runs = StoreNodes(directory, folder, host_id(folder), channels), ChainRuns()
        self._timeout_s, self._lease_s = timeout_s, lease_s
        self.counters = Counters()
        self._paths = BlockPaths(self.counters)
        self._ending: set[asyncio.Task[None]] = set()  # releases and aborts on their way; bounded by calls

    async def close(self) -> None:
        """Wait for what is on its way, then close. No other call may run."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._paths.close()
        self._liveness.release()
        await self._nodes.close()

    async def lookup(
        self, hashes: Sequence[BlockHash], fingerprint: Fingerprint, *, timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> int:
        """How many leading blocks of a chain, given from its start, the store has now; 0 when it does not answer."""
        deadline = time.monotonic() + timeout_s
        num_present = 0
        for node, start, end in self._spans(hashes):
            answer = await self._call(node, "Lookup", kvstore_pb2.LookupRequest(
                block_hashes=b"".join(hashes[start:end]), fingerprint=fingerprint_to_proto(fingerprint)), deadline)
            num_present += len(answer.tiers) if answer is not None else 0
            if num_present < end:
                break
        return num_present

    async def get(
        self, hashes: Sequence[BlockHash], fingerprint: Fingerprint, sink: Sink, *, timeout_s: float | None = None
    ) -> int:
        """Hand out the longest present prefix of `hashes`, a chain or the rest of one that was looked up.

        `sink(index, view)` is called in a worker thread, in order; `view` is valid only until it returns and must not
        be written. Returns how many blocks are good; the sink may have seen one more, which must not be used.
        """
        began = time.monotonic()
        deadline = began + (self._timeout_s if timeout_s is None else timeout_s)
        num_good = 0
        for head, start, end in self._runs.cut(hashes):
            node = self._nodes.of(head)
            if node is not None:
                num_good += await self._get_run(node, hashes, start, end, fingerprint, sink, deadline)
            if num_good < end:
                break
        self.counters.note_get(time.monotonic() - began, num_good)
        return num_good

    async def put(
        self, hashes: Sequence[BlockHash], parent: BlockHash, fingerprint: Fingerprint, views: Sequence[memoryview],
        *, timeout_s: float | None = None,
    ) -> int:
        """Store consecutive blocks of a chain, the first following `parent` (the chain's root for its first block).

        Blocks that are there already are not copied. Views must not change until this returns. Returns how many
        blocks were written; what could not be is simply not stored.
        """
        if len(hashes) != len(views):
            raise ValueError(f"{len(hashes)} hashes, {len(views)} views")
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        num_written = 0
        for head, start, end in self._runs.cut(hashes, parent):
            node = self._nodes.of(head)
            if node is not None:
                num_written += await self._put_run(
                    node, hashes[start:end], hashes[start - 1] if start else parent, fingerprint, views[start:end],
                    deadline)
        return num_written

    async def _get_run(
        self, node: StoreNode, hashes: Sequence[BlockHash], start: int, end: int, fingerprint: Fingerprint,
        sink: Sink, deadline: float,
    ) -> int:
        """All that the node has of a run; in several leases when it cannot lease so much at once."""
        num_good, more = 0, True
        while more and start + num_good < end:
            first = start + num_good
            lease_ends = time.monotonic() + self._lease_s  # before the store starts to count
            answer = await self._call(node, "Get", kvstore_pb2.GetRequest(
                block_hashes=b"".join(hashes[first:end]), fingerprint=fingerprint_to_proto(fingerprint),
                lease_s=self._lease_s, reader_id=self._client_id), deadline)
            if answer is None or not answer.lease_id:
                break
            num_read = await self._read(node, answer, first, sink, min(lease_ends, deadline))
            num_good += num_read
            more = answer.more and num_read == len(answer.slots)
        return num_good

    async def _read(
        self, node: StoreNode, answer: kvstore_pb2.GetResponse, first: int, sink: Sink, until: float
    ) -> int:
        """Hand out the blocks of one lease and end it."""
        corrupt: list[BlockHash] = []
        read = self._paths.read_segment if node.same_host else self._paths.read_stream
        try:
            return await read(node, answer, first, sink, until, corrupt)
        except (OSError, grpc.aio.AioRpcError, ShoalError) as error:
            log.warning("kvstore_get_failed", node=node.service_id, error=str(error))
            node.mark_failed()
            return 0
        finally:
            ended = self._end(node, "Release", kvstore_pb2.ReleaseRequest(
                lease_id=answer.lease_id, corrupt_hashes=b"".join(corrupt)))
            if answer.more:
                await asyncio.wait({ended})  # the next lease needs the room

    async def _put_run(
        self, node: StoreNode, hashes: Sequence[BlockHash], parent: BlockHash, fingerprint: Fingerprint,
        views: Sequence[memoryview], deadline: float,
    ) -> int:
        """Write a run; in several puts when the store does not grant so much at once."""
        num_done = num_written = 0
        while num_done < len(hashes):
            lease_ends = time.monotonic() + self._lease_s
            answer = await self._call(node, "BeginPut", kvstore_pb2.BeginPutRequest(
                block_hashes=b"".join(hashes[num_done:]), parent=hashes[num_done - 1] if num_done else parent,
                fingerprint=fingerprint_to_proto(fingerprint), writer_id=self._client_id, lease_s=self._lease_s,
                block_bytes=views[0].nbytes), deadline)
            if answer is None or not answer.slots:
                break
            num_absent = sum(not slot.present for slot in answer.slots)
            written = await self._write(node, answer, views[num_done:], min(lease_ends, deadline))
            num_written += written
            num_done += len(answer.slots)
            if written < num_absent:
                break
        return num_written

    async def _write(
        self, node: StoreNode, answer: kvstore_pb2.BeginPutResponse, views: Sequence[memoryview], until: float
    ) -> int:
        """Fill and commit one put; returns how many of its absent blocks are stored."""
        if not answer.put_id:
            return 0
        ended = False
        try:
            if not node.same_host:
                written = await self._paths.write_stream(node, answer, views, until)
                ended = True
                return written
            checksums = await self._paths.write_segment(node, answer, views, until)
            committed = await self._call(node, "CommitPut", kvstore_pb2.CommitPutRequest(
                put_id=answer.put_id, fence=answer.fence, checksums=checksums), time.monotonic() + LOOKUP_TIMEOUT_S)
            ended = committed is not None
            return committed.num_committed if committed is not None else 0
        except (OSError, grpc.aio.AioRpcError, ShoalError) as error:
            log.warning("kvstore_put_failed", node=node.service_id, error=str(error))
            node.mark_failed()
            return 0
        finally:
            if not ended:
                self._end(node, "AbortPut", kvstore_pb2.AbortPutRequest(put_id=answer.put_id, fence=answer.fence))

    def _spans(self, hashes: Sequence[BlockHash]) -> list[tuple[StoreNode, int, int]]:
        """Neighbouring runs of one node as one span; ends before the first run whose node is not there."""
        spans: list[tuple[StoreNode, int, int]] = []
        for head, start, end in self._runs.cut(hashes, from_start=True):
            node = self._nodes.of(head)
            if node is None:
                break
            if spans and spans[-1][0] is node:
                spans[-1] = (node, spans[-1][1], end)
            else:
                spans.append((node, start, end))
        return spans

    async def _call(self, node: StoreNode, method: str, request: Any, deadline: float) -> Any:
        """The answer, or None when there is none; a node that does not answer is left alone for a while."""
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        self.counters.num_rpcs += 1
        try:
            return await getattr(node.stub, method)(request, timeout=left)
        except (Unavailable, DeadlineExceeded) as error:
            node.mark_failed()
            log.warning("kvstore_unreachable", node=node.service_id, call=method, error=error.message)
        except ShoalError as error:
            log.warning("kvstore_refused", node=node.service_id, call=method, error=error.message)
        return None

    def _end(self, node: StoreNode, method: str, request: Any) -> asyncio.Task[None]:
        """Tell the store in the background; it finds out by itself when the lease ends."""
        task = asyncio.create_task(self._tell(node, method, request))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _tell(self, node: StoreNode, method: str, request: Any) -> None:
        await self._call(node, method, request, time.monotonic() + LOOKUP_TIMEOUT_S)
