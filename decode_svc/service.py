"""The decode service: proto ↔ dataclasses, and the one place where its parts are joined."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import REGISTRY

from common import logs, rpc
from common.block_hash import HASH_BYTES
from common.clients.decode import LOAD_SUBJECT
from common.errors import InvalidRequest, ShoalError
from common.generation import FinishReason, Generation, TokenDelta
from common.sampling_params import SamplingParams
from common.service_host import Deps, ServiceHost
from decode_svc.config import DecodeConfig
from engine.engine_metrics import EngineMetrics
from engine.model_engine import ModelEngine
from decode_svc.worker import DecodeWorker, Session
from proto import common_pb2, decode_pb2, decode_pb2_grpc, events_pb2, worker_pb2, worker_pb2_grpc

log = logs.get(__name__)

_FINISH = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP, FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT, FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def build(config: DecodeConfig, deps: Deps) -> DecodeService:
    return DecodeService(config, deps)


class DecodeService:
    """A mixed worker: prefill and decode on one engine."""

    def __init__(self, config: DecodeConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._host = ServiceHost(config, deps.registry)
        self._model = config.model_name or Path(config.model_path).name
        self._worker: DecodeWorker | None = None
        self._metrics: EngineMetrics | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        config = self._config
        key = await self._deps.registry.deployment_key()
        engine = await asyncio.to_thread(ModelEngine.load, config, self._model, key)
        self._worker = worker = DecodeWorker(engine.core, self._model, self._deps.fail)
        worker.start()
        self._metrics = EngineMetrics(lambda: worker.stats, self._model, config.block_size)
        REGISTRY.register(self._metrics)
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(worker), self._host.server)
        worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(worker, self._load), self._host.server)
        await self._host.listen()
        await self._host.register(
            models=[self._model], role="mixed", fingerprint=engine.fingerprint, capacity=engine.capacity)
        self._reporting = asyncio.create_task(self._report_load())

    async def drain(self) -> None:
        await self._host.begin_drain()
        if self._worker is not None:
            await self._worker.drain()

    async def stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        if self._worker is not None:
            await self._worker.stop()
        if self._metrics is not None:
            REGISTRY.unregister(self._metrics)
        await self._host.close()

    def _load(self) -> events_pb2.WorkerLoad:
        assert self._worker is not None
        stats = self._worker.stats
        return events_pb2.WorkerLoad(
            worker_id=self._host.service_id, incarnation=self._host.incarnation, model=self._model, role="mixed",
            num_running=stats.num_running, num_waiting=stats.num_waiting, num_blocks=stats.num_blocks,
            num_free_blocks=stats.num_free_blocks, num_preemptions=stats.num_preemptions,
            num_leaked_blocks=stats.num_leaked_blocks, sent_at_unix_ms=int(time.time() * 1000))

    async def _report_load(self) -> None:
        subject = f"{LOAD_SUBJECT}.{self._host.service_id}"
        while True:
            await self._deps.bus.publish(subject, self._load().SerializeToString())
            await asyncio.sleep(self._config.load_interval_s)


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """One `Generate` stream is one `Session`; it ends when the caller does, whatever is left is aborted."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._num_batches = 0

    async def Generate(  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.GenerateCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        await context.send_initial_metadata(())  # tells the caller that the stream is up
        session = self._worker.open_session()
        reading = asyncio.create_task(_read_commands(request_iterator, session))
        try:
            while deltas := await session.next_deltas():
                self._num_batches += 1
                yield decode_pb2.StepBatch(step_id=self._num_batches, deltas=[_delta_to_proto(d) for d in deltas])
        finally:
            reading.cancel()
            session.close()


async def _read_commands(commands: AsyncIterator[decode_pb2.GenerateCommand], session: Session) -> None:
    with contextlib.suppress(grpc.RpcError):
        async for command in commands:
            if command.HasField("submit"):
                _submit(session, command.submit)
            elif command.HasField("abort"):
                session.abort(command.abort.request_id)
    session.close()


def _submit(session: Session, submit: decode_pb2.Submit) -> None:
    try:
        session.submit(_generation_from(submit))
    except ShoalError as error:
        session.deliver([TokenDelta(submit.request_id, (), FinishReason.ERROR, error)])


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """What a worker offers besides its main job."""

    def __init__(self, worker: DecodeWorker, load: Any) -> None:
        self._worker, self._load = worker, load

    async def Load(  # noqa: N802
        self, request: worker_pb2.LoadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> events_pb2.WorkerLoad:
        load: events_pb2.WorkerLoad = self._load()
        return load

    async def ResetPrefixCache(  # noqa: N802
        self, request: worker_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.ResetPrefixCacheResponse:
        return worker_pb2.ResetPrefixCacheResponse(num_blocks_dropped=await self._worker.reset_prefix_cache())


def _generation_from(submit: decode_pb2.Submit) -> Generation:
    raw = submit.block_hashes
    if len(raw) % HASH_BYTES:
        raise InvalidRequest(f"block_hashes: {len(raw)} bytes is not a multiple of {HASH_BYTES}", param="block_hashes")
    return Generation(
        request_id=submit.request_id, model=submit.model, prompt_token_ids=tuple(submit.prompt_token_ids),
        block_hashes=tuple(raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)),
        params=_params_from(submit.params), adapter=submit.adapter, cache_salt=submit.cache_salt,
        timeout_s=submit.timeout_s, trace_context=dict(submit.trace_context))


def _params_from(params: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_k=params.top_k, top_p=params.top_p,
        seed=params.seed, ignore_eos=params.ignore_eos, stop_token_ids=tuple(params.stop_token_ids),
        logit_bias=dict(params.logit_bias))


def _delta_to_proto(delta: TokenDelta) -> decode_pb2.RequestDelta:
    return decode_pb2.RequestDelta(
        request_id=delta.request_id, token_ids=delta.token_ids,
        finish_reason=_FINISH[delta.finish_reason] if delta.finish_reason else common_pb2.FINISH_REASON_UNSPECIFIED,
        error=rpc.error_to_proto(delta.error) if delta.error else None, stop_token_id=delta.stop_token_id,
        num_prompt_tokens=delta.num_prompt_tokens, num_cached_tokens=delta.num_cached_tokens,
        num_output_tokens=delta.num_output_tokens, queue_s=delta.queue_s)


