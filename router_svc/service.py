"""The router service: proto ↔ dataclasses, and the one place where its parts are joined.

Start: follow the event stream (buffering starts), load the mirror, take the directory's list, apply. A router whose
mirror cannot be read starts all the same: it takes snapshots.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio
from prometheus_client import REGISTRY
from redis.exceptions import RedisError

from common import logs, rpc, trace
from common.clients.channels import ChannelPool
from common.clients.kv_events import KvSnapshot, follow_kv_events, read_snapshot
from common.clients.router_wire import (
    OUTCOME_SUBJECT,
    outcome_from,
    outcome_to_proto,
    placement_to_proto,
    query_from,
)
from common.clients.worker import LOAD_SUBJECT
from common.directory import Directory
from common.errors import NotFound, Overloaded, ShoalError, Unavailable
from common.metrics import gauge
from common.server_url import open_redis
from common.service_host import Deps, ServiceHost
from common.service_record import ServiceRecord
from common.span import Attributes, Span, SpanLink, Value
from proto import events_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from router_svc.cache_follower import CacheFollower
from router_svc.config import RouterConfig
from router_svc.curves import CostCurves, MeasuredCurves
from router_svc.decisions import Decision, DecisionLog
from router_svc.index import PrefixIndex
from router_svc.index_metrics import IndexMetrics
from router_svc.load import LoadReport
from router_svc.mirror import NoMirror
from router_svc.overlay import SpeculativeOverlay
from router_svc.placed_ledger import PlacedLedger
from router_svc.pricing import Priced, PricingRules
from router_svc.redis_mirror import RedisMirror
from router_svc.router import NATS_DOWN, REDIS_DOWN, Router
from router_svc.worker_table import WorkerTable

log = logs.get(__name__)

REDIS_TIMEOUT_S = 2.0
LOAD_TIMEOUT_S = 1.0
SNAPSHOT_TIMEOUT_S = 10.0
MAX_SHOWN_CANDIDATES = 32  # in a span; the decision itself keeps all

DEGRADED_NOW = gauge("shoal_router_degraded", "1 while decisions are made without this part", ["why"])


def build(config: RouterConfig, deps: Deps) -> RouterService:
    return RouterService(config, deps)


class RouterService:
    """One replica. Routers share nothing but what they hear and the mirror."""

    def __init__(self, config: RouterConfig, deps: Deps) -> None:
        self._config, self._deps = config, deps
        self._host = ServiceHost(config, deps.registry)
        self._directory = Directory(deps.registry)
        self._channels = ChannelPool(self._host.security)
        self._redis = open_redis(
            config.redis_url, config.servers_ca_file, socket_timeout=REDIS_TIMEOUT_S,
            socket_connect_timeout=REDIS_TIMEOUT_S, max_connections=4) if config.mirror_to_redis else None
        self._index = PrefixIndex(config.max_index_blocks)
        self._mirror = RedisMirror(self._redis, self._index.held) if self._redis is not None else None
        self._follower = CacheFollower(self._index, self._mirror or NoMirror(), self._fetch_snapshot)
        self._table = WorkerTable(self._directory, PlacedLedger(), time.monotonic, config.load_stale_s)
        self._router = Router(
            self._index, SpeculativeOverlay(config.overlay_ttl_s, config.max_overlay_blocks), self._table,
            MeasuredCurves(_curves(config)), DecisionLog(config.max_decisions), _rules(config), self._degraded,
            time.monotonic)
        self._metrics = IndexMetrics(self._index, self._follower)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        router_pb2_grpc.add_RouterServicer_to_server(RouterServicer(self._router), self._host.server)
        await self._directory.start()
        if self._mirror is not None:
            await self._load(self._mirror)
            self._mirror.start()
        self._list_workers()
        await follow_kv_events(self._deps.bus, self._follower.on_batch)
        await self._deps.bus.subscribe(f"{LOAD_SUBJECT}.*", self._on_load)
        await self._deps.bus.subscribe(OUTCOME_SUBJECT, self._on_outcome)
        REGISTRY.register(self._metrics)
        self._tasks = [asyncio.create_task(self._follow_directory()), asyncio.create_task(self._poll_loads())]
        await self._host.listen()
        await self._host.register()

    async def drain(self) -> None:
        await self._host.begin_drain()

    async def stop(self) -> None:
        if self._tasks:
            REGISTRY.unregister(self._metrics)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._follower.stop()
        if self._mirror is not None and self._redis is not None:
            await self._mirror.stop()
            await self._redis.aclose()
        await self._directory.stop()
        await self._host.close()
        await self._channels.close()

    async def _load(self, mirror: RedisMirror) -> None:
        try:
            self._follower.load(await mirror.load(), self._table.caches())
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("mirror_not_loaded", error=repr(error))

    async def _follow_directory(self) -> None:
        while True:
            await self._directory.changed(timeout_s=1.0)
            self._list_workers()

    def _list_workers(self) -> None:
        for worker_id in self._follower.listed(self._table.caches()):
            self._router.on_worker_ended(worker_id)
        for why in (NATS_DOWN, REDIS_DOWN):
            DEGRADED_NOW.labels(why).set(why in self._degraded())

    async def _poll_loads(self) -> None:
        """Ask the workers that report nothing, at most one call at a time each."""
        while True:
            await asyncio.sleep(self._config.load_poll_s)
            await asyncio.gather(*(self._poll_load(record) for record in self._table.silent()))

    async def _poll_load(self, record: ServiceRecord) -> None:
        stub = worker_pb2_grpc.WorkerStub(self._channels.get(record.address))
        try:
            self._take_load(await stub.Load(worker_pb2.LoadRequest(), timeout=LOAD_TIMEOUT_S))
        except ShoalError as error:
            log.debug("load_not_read", worker_id=record.service_id, error=error.message)
            self._table.on_no_answer(record.service_id, record.incarnation)

    async def _fetch_snapshot(self, record: ServiceRecord) -> KvSnapshot:
        stub = worker_pb2_grpc.WorkerStub(self._channels.get(record.address))
        call = stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=SNAPSHOT_TIMEOUT_S)
        try:
            return await read_snapshot(call)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error

    async def _on_load(self, _subject: str, payload: bytes) -> None:
        self._take_load(events_pb2.WorkerLoad.FromString(payload))

    def _take_load(self, load: events_pb2.WorkerLoad) -> None:
        self._router.on_report(LoadReport(
            worker_id=load.worker_id, incarnation=load.incarnation, num_running=load.num_running,
            num_waiting=load.num_waiting, num_waiting_tokens=load.num_waiting_tokens, num_blocks=load.num_blocks,
            num_free_blocks=load.num_free_blocks, num_awaiting_blocks=load.num_awaiting_transfer_blocks,
            step_s=load.step_s, prefill_tokens_per_s=load.prefill_tokens_per_s,
            transfer_bytes_per_s=load.transfer_bytes_per_s, draining=load.draining), load.model)

    async def _on_outcome(self, _subject: str, payload: bytes) -> None:
        outcome = outcome_from(router_pb2.RequestOutcome.FromString(payload))
        told_by = trace.sampled_context()
        with trace.span("outcome", trace.CONSUMER, links=(SpanLink(told_by, {}),) if told_by else ()) as span:
            span.put({"shoal.decision_id": outcome.decision_id, "shoal.attempts": outcome.attempts})
            self._router.on_outcome(outcome)

    def _degraded(self) -> tuple[str, ...]:
        """What decisions are made without now."""
        redis_up = self._directory.reachable and (self._mirror is None or self._mirror.reachable)
        return (*(() if self._deps.bus.connected else (NATS_DOWN,)), *(() if redis_up else (REDIS_DOWN,)))


class RouterServicer(router_pb2_grpc.RouterServicer):
    """Translation only. A refusal that facts support is an answer; everything else is a status."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Route(  # noqa: N802
        self, request: router_pb2.RouteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.RouteResponse:
        span = trace.current()
        try:
            placement = self._router.route(query_from(request))
        except (Overloaded, Unavailable) as error:
            span.fail(error)
            return router_pb2.RouteResponse(refusal=rpc.error_to_proto(error))
        finally:
            self._note_decision(span, request.request_id)
        return router_pb2.RouteResponse(
            placement=placement_to_proto(placement), decision_id=placement.decision_id)

    def _note_decision(self, span: Span, request_id: str) -> None:
        decision = self._router.explain(request_id) if span.recording else None
        if decision is not None:
            span.put(_facts(decision))

    async def Explain(  # noqa: N802
        self, request: router_pb2.ExplainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.ExplainResponse:
        decision = self._router.explain(request.request_id)
        if decision is None:
            raise NotFound(f"request_id: this router has no decision on {request.request_id!r}", param="request_id")
        return _explained(decision)


def _facts(decision: Decision) -> Attributes:
    """What a trace shows of a decision; the first candidates side by side in lists, in one order."""
    shown = decision.candidates[:MAX_SHOWN_CANDIDATES]
    facts: dict[str, Value] = {
        "shoal.decision_id": decision.decision_id, "shoal.attempt": decision.attempt,
        "shoal.route.num_candidates": len(decision.candidates),
        "shoal.route.candidates": [_place(c) for c in shown],
        "shoal.route.predicted_ttft_s": [c.predicted_ttft_s for c in shown]}
    if decision.degraded:
        facts["shoal.route.degraded"] = decision.degraded
    choice = decision.choice
    if choice is not None:
        facts.update({
            "shoal.route.choice": _place(choice), "shoal.route.source": choice.source,
            "shoal.route.overlap_tokens": choice.cached_tokens, "shoal.route.cost_s": choice.predicted_ttft_s})
    return facts


def _place(priced: Priced) -> str:
    return f"{priced.prefill.worker_id}>{priced.decode.worker_id}" if priced.prefill else priced.decode.worker_id


def _explained(decision: Decision) -> router_pb2.ExplainResponse:
    return router_pb2.ExplainResponse(
        request_id=decision.request_id, decision_id=decision.decision_id,
        candidates=[_candidate(c) for c in decision.candidates], chosen=decision.chosen or 0,
        refused=decision.chosen is None, degraded=decision.degraded,
        outcome=outcome_to_proto(decision.outcome) if decision.outcome else None)


def _candidate(priced: Priced) -> router_pb2.Candidate:
    return router_pb2.Candidate(
        decode_worker_id=priced.decode.worker_id, prefill_worker_id=priced.prefill.worker_id if priced.prefill else "",
        source=priced.source, cached_tokens=priced.cached_tokens, queue_s=priced.queue_s, prefill_s=priced.prefill_s,
        transfer_s=priced.transfer_s, predicted_ttft_s=priced.predicted_ttft_s,
        predicted_itl_s=priced.predicted_itl_s, rejected_because=priced.rejected_because)


def _curves(config: RouterConfig) -> CostCurves:
    return CostCurves(
        prefill_tokens_per_s=config.prefill_tokens_per_s, step_s=config.step_s,
        transfer_bytes_per_s=config.transfer_bytes_per_s, hop_s=config.hop_s)


def _rules(config: RouterConfig) -> PricingRules:
    return PricingRules(
        local_prefill_tokens=config.local_prefill_tokens, patience=config.handoff_patience, tie_ratio=config.near_tie,
        itl_limit_s=config.itl_limit_s)
