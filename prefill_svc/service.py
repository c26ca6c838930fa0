"""The prefill service: proto ↔ dataclasses, and the one place where its parts are joined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from common import trace
from common.block_hash import HASH_BYTES
from common.blocks.host_id import host_id, open_shm_dir
from common.blocks.mapped_segments import MappedSegments
from common.blocks.shm_pusher import ShmPusher
from common.clients.channels import ChannelPool
from common.clients.fingerprint import fingerprint_from_proto
from common.clients.kv_events import KvEventPublisher
from common.clients.kv_push import GrpcPusher
from common.clients.kvstore import KvStoreClient
from common.clients.prefill import event_to_proto, order_from_proto
from common.clients.worker import LOAD_SUBJECT, WorkerServicer
from common.directory import Directory
from common.errors import ConfigError, InvalidRequest
from common.gpu_metrics import GpuMetrics
from common.hand_off import GRPC, SHM, Done, PrefillOrder, Pusher
from common.kv_event import KvEvent
from common.rpc import error_to_proto
from common.service_host import Deps, ServiceHost
from engine.engine_metrics import EngineMetrics
from engine.engine_port import EnginePort, Fetch
from engine.engine_start import start_engine
from engine.kv_transfer.sender import Sender
from engine.kv_transfer.worker_kv import WorkerKv
from engine.outputs import RequestOutput
from prefill_svc.config import PrefillConfig
from prefill_svc.desk import PrefillDesk
from prefill_svc.transfer_metrics import SendMetrics
from proto import events_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2_grpc


def build(config: PrefillConfig, deps: Deps) -> PrefillService:
    return PrefillService(config, deps)


class PrefillService:
    """One engine that computes prompts, and the desk that hands them off."""

    def __init__(self, config: PrefillConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._host = ServiceHost(config, deps.registry)
        self._model = config.model_name or Path(config.model_path).name
        self._shm_dir = open_shm_dir(config.shm_dir)
        self._directory = Directory(deps.registry)
        self._channels = ChannelPool(self._host.security)
        self._mapped = MappedSegments()
        self._publisher = KvEventPublisher(deps.bus, self._host.service_id, self._host.incarnation, self._model)
        self._parts: _Parts | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        config = self._config
        key = await self._deps.registry.deployment_key()
        ears = _Ears(self._publisher, self._deps.fail)
        engine = await start_engine(config, self._model, key, ears)
        if not engine.facts.has_host_blocks:
            await engine.stop()
            raise ConfigError(
                f"device={config.device}: a prefill worker hands its KV off, which a GPU's cannot be yet; "
                "run mixed workers on GPUs", param="device")
        await self._directory.start()
        store = KvStoreClient(self._directory, self._shm_dir, channels=self._channels)
        self._parts = parts = _Parts(self, engine, store)
        ears.hear(parts.sender, parts.kv)
        parts.kv.start()
        self._publisher.start()
        for collector in parts.collectors:
            REGISTRY.register(collector)
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(parts.desk), self._host.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(
            WorkerServicer(self._load, engine.reset_prefix_cache, self._publisher), self._host.server)
        await self._host.listen()
        await self._host.register(
            models=[self._model], role="prefill", fingerprint=engine.facts.fingerprint, capacity=engine.facts.capacity,
            host_id=host_id(self._shm_dir), transports=(SHM, GRPC))
        self._reporting = asyncio.create_task(self._report_load())

    async def drain(self) -> None:
        await self._host.begin_drain()
        if self._parts is not None:
            await self._parts.desk.drain()

    async def stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._parts is not None:
            await self._parts.kv.stop(self._config.store_flush_s)
            await self._parts.engine.stop()
            for collector in self._parts.collectors:
                REGISTRY.unregister(collector)
            await self._parts.store.close()
        self._publisher.stop()
        await self._host.close()
        await self._channels.close()
        await self._directory.stop()
        self._mapped.close()

    def open_pusher(self, order: PrefillOrder) -> Pusher:
        if order.ticket.transport == SHM:
            return ShmPusher(order.ticket, self._shm_dir, self._mapped)
        if order.ticket.transport == GRPC:
            return GrpcPusher(order, self._channels)
        raise InvalidRequest(
            f"ticket.transport: must be {SHM} or {GRPC}, got {order.ticket.transport!r}", param="ticket.transport")

    def _load(self) -> events_pb2.WorkerLoad:
        assert self._parts is not None
        stats, desk = self._parts.engine.stats, self._parts.desk
        return events_pb2.WorkerLoad(
            worker_id=self._host.service_id, incarnation=self._host.incarnation, model=self._model, role="prefill",
            num_running=desk.num_live, num_waiting=stats.num_waiting, num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks, num_waiting_tokens=desk.num_queued_tokens,
            step_s=stats.step_s, prefill_tokens_per_s=stats.prefill_tokens_per_s,
            num_leaked_blocks=stats.num_leaked_blocks, sent_at_unix_ms=int(time.time() * 1000))

    async def _report_load(self) -> None:
        subject = f"{LOAD_SUBJECT}.{self._host.service_id}"
        while True:
            await self._deps.bus.publish(subject, self._load().SerializeToString())
            await asyncio.sleep(self._config.load_interval_s)


class _Ears:
    """Listens to the engine from its start on; who is to hear comes later, before there is anything to hear."""

    def __init__(self, publisher: KvEventPublisher, on_fatal: Callable[[str], None]) -> None:
        self._publisher, self._on_fatal = publisher, on_fatal
        self._sender: Sender | None = None
        self._kv: WorkerKv | None = None

    def hear(self, sender: Sender, kv: WorkerKv) -> None:
        self._sender, self._kv = sender, kv

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        if self._sender is not None:
            self._sender.on_outputs(outputs)

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        self._publisher.publish(events)
        if self._kv is not None:
            self._kv.on_kv_events(events)

    def on_fetches(self, fetches: Sequence[Fetch]) -> None:
        """Nothing that only prefills is preempted."""

    def on_failed(self, why: str) -> None:
        self._on_fatal(why)


class _Parts:
    """What exists once the model is loaded."""

    def __init__(self, service: PrefillService, engine: EnginePort, store: KvStoreClient) -> None:
        config, fingerprint = service._config, engine.facts.fingerprint
        self.engine, self.store = engine, store
        self.kv = WorkerKv(engine, store, fingerprint, writes=config.store_policy == "all")
        loader = self.kv.loader if config.enable_prefix_caching else None
        self.sender = Sender(engine, loader, service.open_pusher, fingerprint.block_size)
        self.desk = PrefillDesk(
            self.sender, fingerprint, service._host.incarnation, max_transfers=config.max_transfers,
            grant_lease_s=config.grant_lease_s)
        self.collectors: tuple[Collector, ...] = (
            EngineMetrics(lambda: engine.stats, service._model, fingerprint.block_size, stages=self._stages,
                          vllm_names=config.metrics_compat == "vllm"),
            SendMetrics(self.sender.counts, self.kv.loader.counts,
                        self.kv.write_back.counts if self.kv.write_back else None),
            GpuMetrics())

    def _stages(self) -> dict[str, int]:
        return {"granted": self.desk.num_granted, "transferring": self.desk.num_live}


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """The receiver's stream is the transfer's life: when it ends, so does the transfer."""

    def __init__(self, desk: PrefillDesk) -> None:
        self._desk = desk

    async def Grant(  # noqa: N802
        self, request: prefill_pb2.GrantRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.GrantResponse:
        grant = self._desk.grant(
            request.transfer_id, request.num_prompt_tokens, fingerprint_from_proto(request.fingerprint))
        return prefill_pb2.GrantResponse(
            granted=grant.granted, lease_s=grant.lease_s, queued_requests=grant.queued_requests,
            queued_tokens=grant.queued_tokens, incarnation=grant.incarnation,
            refusal=error_to_proto(grant.refusal) if grant.refusal else None)

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        raw = request.block_hashes
        if len(raw) % HASH_BYTES:
            raise InvalidRequest(f"block_hashes: not a multiple of {HASH_BYTES} bytes", param="block_hashes")
        hashes = tuple(raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES))
        async with aclosing(self._desk.prefill(order_from_proto(request, hashes))) as events:
            async for event in events:
                if isinstance(event, Done):
                    trace.current().finish()  # the receiver hangs up on it
                yield event_to_proto(request.transfer_id, request.epoch, event)

    async def AbortTransfer(  # noqa: N802
        self, request: prefill_pb2.AbortTransferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.AbortTransferResponse:
        return prefill_pb2.AbortTransferResponse(quiesced=await self._desk.abort(request.transfer_id, request.epoch))
