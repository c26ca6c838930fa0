"""The KV store as workers see it: chains of blocks in and out, never an error, at worst a miss.

A get, for each run of 128 blocks: Get (leases the longest present prefix) → each block in order: checksum, then `sink`,
then "was the lease still held?" → Release. A block counts only when all three hold, so what a late or stopped
reader copied is never taken for good. A put: BeginPut (slots for the absent blocks) → copy and checksum → CommitPut.
Bytes go through the store's memory-mapped segment on its own host, else as a gRPC byte stream.

Runs are aligned to the chain's start, and a run lives on one node (rendezvous hashing of its first hash), so a chain's
blocks live and are evicted together. A cancelled call returns only when no thread touches the caller's memory any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import grpc.aio

from common import logs
from common.block_hash import BlockHash
from common.blocks.host_id import host_id
from common.blocks.liveness import Liveness
from common.clients.fingerprint import fingerprint_to_proto
from common.clients.kvstore_nodes import StoreNode, StoreNodes
from common.clients.kvstore_paths import BlockPaths, Counters, Sink
from common.directory import Directory
from common.errors import DeadlineExceeded, ShoalError, Unavailable
from common.service_record import Fingerprint
from proto import kvstore_pb2

log = logs.get(__name__)

RUN_BLOCKS: Final = 128
LOOKUP_TIMEOUT_S: Final = 1.0
TIMEOUT_S: Final = 5.0
LEASE_S: Final = 10.0


class KvStoreClient:
    """Ready when made; `stop` once. The directory is started and stopped by its owner.

    `client_id` names this process life (`<service id>-<incarnation>`): while it lives, the store never grants the
    slots of an unfinished put of it to anybody else.
    """

    def __init__(
        self, directory: Directory, shm_dir: Path, client_id: str, *, timeout_s: float = TIMEOUT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._nodes = StoreNodes(directory, shm_dir, host_id(shm_dir))
        self._client_id, self._timeout_s, self._lease_s = client_id, timeout_s, lease_s
        self._liveness = Liveness.hold(shm_dir, client_id)
        self.counters = Counters()
        self._paths = BlockPaths(self.counters)
        self._ending: set[asyncio.Task[None]] = set()  # releases and aborts on their way; bounded by calls

    async def stop(self) -> None:
        """Wait for what is on its way, then close. No other call may run."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._paths.close()
        self._liveness.release()
        await self._nodes.close()

    async def lookup(
        self, hashes: Sequence[BlockHash], fingerprint: Fingerprint, *, timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> int:
        """How many blocks of the chain, from its start, the store holds now; 0 when it does not answer."""
        deadline = time.monotonic() + timeout_s
        print_ = fingerprint_to_proto(fingerprint)
        num_present = 0
        for node, start, end in self._spans(hashes):
            request = kvstore_pb2.LookupRequest(block_hashes=b"".join(hashes[start:end]), fingerprint=print_)
            answer = await self._call(node, "Lookup", request, deadline)
            num_present += len(answer.tiers) if answer is not None else 0
            if num_present < end:
                break
        return num_present

    async def get(
        self, hashes: Sequence[BlockHash], fingerprint: Fingerprint, sink: Sink, *, start: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Hand out blocks `start`, `start + 1`, ... of a chain that is given from its first block.

        `sink(index, view)` is called in a worker thread, in order; `view` is read-only in effect, and valid only until
        it returns. Returns how many blocks are good; the sink may have seen one more, which must not be used.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        first = start
        began = time.monotonic()
        for head in range(start // RUN_BLOCKS * RUN_BLOCKS, len(hashes), RUN_BLOCKS):
            end = min(head + RUN_BLOCKS, len(hashes))
            node = self._nodes.of(hashes[head])
            if node is None:
                break
            first += await self._get_run(node, hashes, first, end, fingerprint, sink, deadline)
            if first < end:
                break
        self.counters.note_get(time.monotonic() - began, first - start)
        return first - start

    async def put(
        self, hashes: Sequence[BlockHash], parent: BlockHash, fingerprint: Fingerprint, views: Sequence[memoryview],
        *, timeout_s: float | None = None,
    ) -> int:
        """Store the last `len(views)` blocks of a chain that is given from its first block, which follows `parent`.

        Blocks that are there already are not copied. Views must not change until this returns. Returns how many
        blocks were written; what could not be is simply not stored.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        offset = len(hashes) - len(views)
        if offset < 0:
            raise ValueError(f"{len(views)} views for {len(hashes)} hashes")
        num_written, first = 0, offset
        for head in range(offset // RUN_BLOCKS * RUN_BLOCKS, len(hashes), RUN_BLOCKS):
            end = min(head + RUN_BLOCKS, len(hashes))
            node = self._nodes.of(hashes[head])
            if node is not None:
                before = hashes[first - 1] if first else parent
                num_written += await self._put_run(
                    node, hashes[first:end], before, fingerprint, views[first - offset : end - offset], deadline)
            first = end
        return num_written

    async def _get_run(
        self, node: StoreNode, hashes: Sequence[BlockHash], first: int, end: int, fingerprint: Fingerprint,
        sink: Sink, deadline: float,
    ) -> int:
        lease_ends = time.monotonic() + self._lease_s  # before the store starts to count
        answer = await self._call(node, "Get", kvstore_pb2.GetRequest(
            block_hashes=b"".join(hashes[first:end]), fingerprint=fingerprint_to_proto(fingerprint),
            lease_s=self._lease_s, reader_id=self._client_id), deadline)
        if answer is None or not answer.lease_id:
            return 0
        corrupt: list[BlockHash] = []
        try:
            until = min(lease_ends, deadline)
            if node.same_host:
                return await self._paths.read_segment(node, answer, first, sink, until, corrupt)
            return await self._paths.read_stream(node, answer, first, sink, until, corrupt)
        except (OSError, grpc.aio.AioRpcError, ShoalError) as error:
            log.warning("kvstore_get_failed", node=node.service_id, error=str(error))
            node.mark_failed()
            return 0
        finally:
            self._end(node, "Release", kvstore_pb2.ReleaseRequest(
                lease_id=answer.lease_id, corrupt_hashes=b"".join(corrupt)))

    async def _put_run(
        self, node: StoreNode, hashes: Sequence[BlockHash], parent: BlockHash, fingerprint: Fingerprint,
        views: Sequence[memoryview], deadline: float,
    ) -> int:
        lease_ends = time.monotonic() + self._lease_s
        answer = await self._call(node, "BeginPut", kvstore_pb2.BeginPutRequest(
            block_hashes=b"".join(hashes), parent=parent, fingerprint=fingerprint_to_proto(fingerprint),
            writer_id=self._client_id, lease_s=self._lease_s, block_bytes=views[0].nbytes), deadline)
        if answer is None or not answer.put_id:
            return 0
        until = min(lease_ends, deadline)
        ended = False
        try:
            if not node.same_host:
                written = await self._paths.write_stream(node, answer, views, until)
                ended = True
                return written
            checksums = await self._paths.write_segment(node, answer, views, until)
            commit = kvstore_pb2.CommitPutRequest(put_id=answer.put_id, fence=answer.fence, checksums=checksums)
            committed = await self._call(node, "CommitPut", commit, time.monotonic() + LOOKUP_TIMEOUT_S)
            ended = committed is not None
            return committed.num_committed if committed is not None else 0
        except (OSError, grpc.aio.AioRpcError, ShoalError) as error:
            log.warning("kvstore_put_failed", node=node.service_id, error=str(error))
            node.mark_failed()
            return 0
        finally:
            if not ended:
                self._end(node, "AbortPut", kvstore_pb2.AbortPutRequest(put_id=answer.put_id, fence=answer.fence))

    def _spans(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[StoreNode, int, int]]:
        """Neighbouring runs of one node as one span; ends before the first run whose node is not there."""
        node, start = None, 0
        for head in range(0, len(hashes), RUN_BLOCKS):
            holder = self._nodes.of(hashes[head])
            if node is not None and holder is not node:
                yield node, start, head
            if holder is None:
                return
            if holder is not node:
                node, start = holder, head
        if node is not None:
            yield node, start, len(hashes)

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

    def _end(self, node: StoreNode, method: str, request: Any) -> None:
        """Tell the store in the background; it finds out by itself when the lease ends."""
        task = asyncio.create_task(self._told(self._call(node, method, request, time.monotonic() + LOOKUP_TIMEOUT_S)))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _told(self, call: Coroutine[Any, Any, Any]) -> None:
        with contextlib.suppress(Exception):
            await call
