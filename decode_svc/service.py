"""The decode service: proto ↔ dataclasses, and the one place where its parts are joined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from common import logs
from common.blocks.host_id import host_id, open_shm_dir
from common.blocks.landing import Landings
from common.blocks.segment import remove_stale
from common.clients.channels import ChannelPool
from common.clients.generate import delta_to_proto, generation_from_proto
from common.clients.kv_events import KvEventPublisher
from common.clients.kvstore import KvStoreClient
from common.clients.prefill import PrefillClient
from common.clients.worker import LOAD_SUBJECT, WorkerServicer
from common.directory import Directory
from common.errors import ShoalError
from common.generation import FinishReason, TokenDelta
from common.gpu_metrics import GpuMetrics
from common.hand_off import GRPC, SHM
from common.kv_event import KvEvent
from common.placement import Placement
from common.service_host import Deps, ServiceHost
from decode_svc.admission import KvAdmission
from decode_svc.config import DecodeConfig
from decode_svc.request_metrics import RequestMetrics
from decode_svc.transfer_metrics import TransferMetrics
from decode_svc.worker import DecodeWorker, Session
from engine.engine_metrics import EngineMetrics
from engine.engine_start import start_engine
from engine.kv_transfer.receiver import Receiver, Route
from engine.kv_transfer.worker_kv import WorkerKv
from proto import decode_pb2, decode_pb2_grpc, events_pb2, prefill_pb2, prefill_pb2_grpc, worker_pb2_grpc

log = logs.get(__name__)


def build(config: DecodeConfig, deps: Deps) -> DecodeService:
    return DecodeService(config, deps)


class DecodeService:
    """One engine that decodes; prompts come from a prefill worker, the store, or its own engine."""

    def __init__(self, config: DecodeConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._host = ServiceHost(config, deps.registry)
        self._model = config.model_name or Path(config.model_path).name
        self._shm_dir = open_shm_dir(config.shm_dir)
        self._host_id = host_id(self._shm_dir)
        self._directory = Directory(deps.registry)
        self._channels = ChannelPool(self._host.security)
        self._publisher = KvEventPublisher(deps.bus, self._host.service_id, self._host.incarnation, self._model)
        self._store = KvStoreClient(self._directory, self._shm_dir, channels=self._channels)
        self._worker: DecodeWorker | None = None
        self._kv: WorkerKv | None = None
        self._moves_kv = True
        self._receiver: Receiver | None = None
        self._landings: Landings | None = None
        self._metrics: list[Collector] = []
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        config = self._config
        key = await self._deps.registry.deployment_key()
        worker = self._worker = DecodeWorker(self._model, self._on_kv_events, self._deps.fail)
        engine = await start_engine(config, self._model, key, worker)
        facts = engine.facts
        await self._directory.start()
        await asyncio.to_thread(remove_stale, self._shm_dir)  # landing files of a life that was killed
        moves_kv = self._moves_kv = facts.has_host_blocks
        if not moves_kv:
            log.info("kv_stays_on_device", device=config.device, why="no hand-off to or from a GPU, and no store")
        kv = self._kv = WorkerKv(
            engine, self._store, facts.fingerprint, writes=moves_kv and config.store_policy == "all")
        decode_pb2_grpc.add_DecodeServicer_to_server(
            DecodeServicer(worker, config.heartbeat_s), self._host.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(
            WorkerServicer(self._load, worker.reset_prefix_cache, self._publisher), self._host.server)
        landings = self._landings = Landings(
            self._shm_dir, self._host.service_id, self._host.incarnation, facts.block_bytes)
        prefill_pb2_grpc.add_KvTransferServicer_to_server(KvTransferServicer(landings), self._host.server)
        landings.address = await self._host.listen()
        receiver = self._receiver = Receiver(
            engine, PrefillClient(self._channels), landings.open, facts.fingerprint,
            stall_s=config.handoff_stall_s)
        loader = kv.loader if moves_kv and config.enable_prefix_caching else None
        admission = KvAdmission(engine, loader, receiver, self._find_route, worker.meter, worker.spans,
                                block_size=facts.fingerprint.block_size, timeout_s=config.handoff_timeout_s)
        worker.start(engine, admission)
        kv.start()
        if loader is not None and kv.write_back is not None:
            loader.offer()
        self._publisher.start()
        vllm_names = config.metrics_compat == "vllm"
        self._register_metrics(
            EngineMetrics(lambda: worker.stats, self._model, facts.fingerprint.block_size,
                          stages=lambda: {"admitting": worker.num_admitting}, vllm_names=vllm_names),
            RequestMetrics(worker.meter.counts, self._model, vllm_names=vllm_names), GpuMetrics(),
            TransferMetrics(receiver.counts, kv.loader.counts, kv.write_back.counts if kv.write_back else None,
                            admission.counts))
        transports = (SHM, GRPC) if config.transport == "auto" else (config.transport,)
        await self._host.register(
            models=[self._model], role=config.role, fingerprint=facts.fingerprint, capacity=facts.capacity,
            host_id=self._host_id, transports=transports if moves_kv else ())
        self._reporting = asyncio.create_task(self._report_load())

    async def drain(self) -> None:
        await self._host.begin_drain()
        if self._worker is not None:
            await self._worker.drain()

    async def stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._kv is not None:
            await self._kv.stop(self._config.store_flush_s)
        if self._worker is not None:
            await self._worker.stop()
        for collector in self._metrics:
            REGISTRY.unregister(collector)
        self._publisher.stop()
        await self._store.close()
        await self._host.close()
        await self._channels.close()
        await self._directory.stop()
        if self._landings is not None:
            self._landings.close()

    def _register_metrics(self, *collectors: Collector) -> None:
        for collector in collectors:
            REGISTRY.register(collector)
            self._metrics.append(collector)

    def _on_kv_events(self, events: Sequence[KvEvent]) -> None:
        self._publisher.publish(events)
        if self._kv is not None:
            self._kv.on_kv_events(events)

    def _find_route(self, placement: Placement) -> Route | None:
        """The prefill worker of a placement, if that life of it is still listed."""
        record = self._directory.get("prefill", placement.prefill_worker_id) if placement.prefill_worker_id else None
        if not self._moves_kv or record is None or record.state != "ready" or (
                placement.prefill_incarnation not in ("", record.incarnation)):
            return None
        shared = record.host_id == self._host_id and self._config.transport != GRPC
        return Route(record.service_id, record.address, SHM if shared else GRPC)

    def _load(self) -> events_pb2.WorkerLoad:
        assert self._worker is not None
        stats = self._worker.stats
        return events_pb2.WorkerLoad(
            worker_id=self._host.service_id, incarnation=self._host.incarnation, model=self._model,
            role=self._config.role, num_running=stats.num_running, num_waiting=stats.num_waiting,
            num_blocks=stats.num_blocks, num_free_blocks=stats.num_free_blocks,
            num_waiting_tokens=stats.num_waiting_tokens, num_awaiting_transfer_blocks=stats.num_awaiting_blocks,
            step_s=stats.step_s, prefill_tokens_per_s=stats.prefill_tokens_per_s,
            transfer_bytes_per_s=self._transfer_rate(), num_preemptions=stats.num_preemptions,
            num_leaked_blocks=stats.num_leaked_blocks,
            sent_at_unix_ms=int(time.time() * 1000))

    def _transfer_rate(self) -> float:
        """Bytes per second of the latest hand-offs; 0 while there are none, so that an idle worker is tried again."""
        return self._receiver.rate.bytes_per_s if self._receiver is not None else 0.0

    async def _report_load(self) -> None:
        subject = f"{LOAD_SUBJECT}.{self._host.service_id}"
        while True:
            await self._deps.bus.publish(subject, self._load().SerializeToString())
            await asyncio.sleep(self._config.load_interval_s)


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """One `Generate` stream is one `Session`; it ends when the caller does, whatever is left is aborted."""

    def __init__(self, worker: DecodeWorker, heartbeat_s: float) -> None:
        self._worker, self._heartbeat_s = worker, heartbeat_s

    async def Generate(  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.GenerateCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        await context.send_initial_metadata(())  # tells the caller that the stream is up
        session = self._worker.open_session()
        reading = asyncio.create_task(_read_commands(request_iterator, session))
        num_batches = 0
        try:
            while not session.closed:  # an empty batch is a heartbeat
                deltas = await session.next_deltas(self._heartbeat_s)
                num_batches += 1
                yield decode_pb2.StepBatch(step_id=num_batches, deltas=[delta_to_proto(d) for d in deltas])
        finally:
            reading.cancel()
            session.close()


async def _read_commands(commands: AsyncIterator[decode_pb2.GenerateCommand], session: Session) -> None:
    try:
        async for command in commands:
            if command.HasField("submit"):
                _submit(session, command.submit)
            elif command.HasField("abort"):
                session.abort(command.abort.request_id)
    except grpc.RpcError:
        log.debug("caller_gone")
    except Exception:
        log.exception("commands_failed")
    finally:
        session.close()


def _submit(session: Session, submit: decode_pb2.Submit) -> None:
    try:
        session.submit(generation_from_proto(submit))
    except ShoalError as error:
        session.deliver([TokenDelta(submit.request_id, (), FinishReason.ERROR, error)])


class KvTransferServicer(prefill_pb2_grpc.KvTransferServicer):
    """Takes KV that comes as messages; what comes for a transfer that has ended is dropped and refused."""

    def __init__(self, landings: Landings) -> None:
        self._landings = landings

    async def Push(  # noqa: N802
        self, request_iterator: AsyncIterator[prefill_pb2.KvChunk], context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.KvChunkAck:
        num_bytes = 0
        async for chunk in request_iterator:
            self._landings.write(
                chunk.transfer_id, chunk.first_block, chunk.num_blocks, chunk.offset, chunk.payload)
            num_bytes += len(chunk.payload)
        return prefill_pb2.KvChunkAck(num_bytes=num_bytes)
