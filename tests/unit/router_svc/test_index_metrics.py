"""Staleness of the index by worker, and that a worker's series end with it."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from common.clients.kv_events import KvBatch, KvSnapshot
from common.service_record import ServiceRecord
from router_svc.cache_follower import CacheFollower
from router_svc.index import PrefixIndex
from router_svc.index_metrics import IndexMetrics
from router_svc.mirror import NoMirror
from tests.unit.router_svc.builders import record


async def test_each_listed_worker_has_an_age_that_its_heartbeats_reset() -> None:
    async def fetch(worker: ServiceRecord) -> KvSnapshot:
        return KvSnapshot(worker.service_id, worker.incarnation, 1, ())

    index = PrefixIndex(100)
    follower = CacheFollower(index, NoMirror(), fetch, retry_s=0.01)
    registry = CollectorRegistry()
    registry.register(IndexMetrics(index, follower))

    def age(worker_id: str) -> float | None:
        return registry.get_sample_value("shoal_router_event_age_seconds", {"worker_id": worker_id})

    follower.listed({"d0": record("d0"), "d1": record("d1")})
    await asyncio.sleep(0.05)
    await follower.on_batch(KvBatch("d0", record("d0").incarnation, "m", 1, ()))
    quiet, heard = age("d1"), age("d0")
    assert quiet is not None
    assert heard is not None
    assert heard < quiet
    oldest = registry.get_sample_value("shoal_router_oldest_event_age_seconds")
    assert oldest is not None
    assert oldest >= quiet
    assert registry.get_sample_value("shoal_router_index_workers") == 2
    follower.listed({"d0": record("d0")})
    assert age("d1") is None
    await follower.stop()
