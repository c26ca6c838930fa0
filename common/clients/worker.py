"""What every worker offers besides its main job, both sides: load, cache reset, snapshot of its KV."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from common.clients.kv_events import KvEventPublisher, snapshot_chunks
from proto import events_pb2, worker_pb2, worker_pb2_grpc

LOAD_SUBJECT = "shoal.load"  # shoal.load.<worker_id>


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """`reset_prefix_cache` returns how many blocks it dropped."""

    def __init__(
        self, load: Callable[[], events_pb2.WorkerLoad], reset_prefix_cache: Callable[[], Awaitable[int]],
        publisher: KvEventPublisher,
    ) -> None:
        self._load, self._reset, self._publisher = load, reset_prefix_cache, publisher

    async def Load(  # noqa: N802
        self, request: worker_pb2.LoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> events_pb2.WorkerLoad:
        return self._load()

    async def ResetPrefixCache(  # noqa: N802
        self, request: worker_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResetPrefixCacheResponse:
        return worker_pb2.ResetPrefixCacheResponse(num_blocks_dropped=await self._reset())

    async def Snapshot(  # noqa: N802
        self, request: worker_pb2.SnapshotRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SnapshotChunk]:
        for chunk in snapshot_chunks(self._publisher.snapshot()):
            yield chunk
