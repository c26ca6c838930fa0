"""How far the router's index is behind its workers, read at scrape time.

Series are of the workers listed now, so their number is that of the fleet and a worker's series end with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router_svc.cache_follower import CacheFollower
from router_svc.index import PrefixIndex

MAX_WORKERS = 1024  # with series of their own; the maximum is over all


class IndexMetrics(Collector):
    def __init__(self, index: PrefixIndex, follower: CacheFollower) -> None:
        self._index, self._follower = index, follower

    def describe(self) -> list[Metric]:
        """None ahead of time: a test may hold several routers in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        ages = self._follower.ages_s()
        age = GaugeMetricFamily(
            "shoal_router_event_age_seconds", "since the last KV event batch or snapshot of a worker; idle workers "
            "repeat their last batch number, so an age that grows is a silence", labels=["worker_id"])
        for worker_id, seconds in sorted(ages.items())[:MAX_WORKERS]:
            age.add_metric([worker_id], seconds)
        yield age
        for name, text, value in (
            ("shoal_router_oldest_event_age_seconds", "the largest of these ages", max(ages.values(), default=0.0)),
            ("shoal_router_index_blocks", "different block hashes in the index", self._index.num_blocks),
            ("shoal_router_index_workers", "workers whose blocks are followed", len(ages)),
            ("shoal_router_syncing_workers", "workers whose snapshot is on the way", self._follower.num_syncing),
        ):
            yield GaugeMetricFamily(name, text, value)
