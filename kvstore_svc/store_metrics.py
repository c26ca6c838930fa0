"""What Prometheus is told of a store node, read when it asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore_svc.block_pool import BlockPool
from kvstore_svc.chain_index import Tier
from kvstore_svc.put_ledger import PutLedger
from kvstore_svc.store import BlockStore
from kvstore_svc.tier_mover import TierMover


class StoreMetrics(Collector):
    """A collector over the parts' own counters; registered and unregistered by the service."""

    def __init__(
        self, pool: BlockPool, mover: TierMover, puts: PutLedger, store: BlockStore, capacity_bytes: Mapping[Tier, int],
    ) -> None:
        self._pool, self._mover, self._puts, self._store = pool, mover, puts, store
        self._capacity_bytes = capacity_bytes

    def describe(self) -> list[Metric]:
        """None ahead of time: a test may hold several nodes in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._tiers()
        counts = self._store.counters
        hits = CounterMetricFamily("shoal_kvstore_hits", "blocks leased, by the tier they were in", labels=["tier"])
        hits.add_metric([Tier.DRAM], counts.num_hits_dram)
        hits.add_metric([Tier.SSD], counts.num_hits_ssd)
        yield hits
        for name, text, value in (
            ("put_blocks", "blocks committed by puts", counts.num_put),
            ("put_present_blocks", "blocks of puts that were wholly present already", counts.num_put_present),
            ("missed_blocks", "blocks asked for by gets and not leased", counts.num_missed),
            ("expired_puts", "puts whose writer did not end them within the lease", counts.num_expired),
            ("corrupt_blocks", "blocks dropped because their bytes were wrong", self._mover.num_corrupt),
            ("disk_errors", "failed calls to the SSD tier's file", self._mover.num_disk_errors),
        ):
            yield CounterMetricFamily(f"shoal_kvstore_{name}", text, value=value)
        for name, text, value in (
            ("leased_blocks", "blocks that readers hold", self._store.num_leased),
            ("held_blocks", "DRAM slots whose bytes are being written", self._pool.num_held(Tier.DRAM)),
            ("unwritten_blocks", "blocks that wait to be written through to SSD", self._mover.num_unwritten),
            ("open_puts", "unfinished puts", self._puts.num_open),
            ("quarantined_blocks", "slots of expired puts whose writer still lives", self._puts.num_quarantined),
        ):
            yield GaugeMetricFamily(f"shoal_kvstore_{name}", text, value=value)

    def _tiers(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("shoal_kvstore_blocks", "blocks in a tier", labels=["tier"])
        used = GaugeMetricFamily("shoal_kvstore_used_bytes", "bytes of granted slots in a tier", labels=["tier"])
        capacity = GaugeMetricFamily("shoal_kvstore_capacity_bytes", "bytes that a tier can hold", labels=["tier"])
        evicted = CounterMetricFamily("shoal_kvstore_evicted_blocks", "blocks taken out of a tier", labels=["tier"])
        for tier in Tier:
            blocks.add_metric([tier], self._pool.index.num_blocks(tier))
            used.add_metric([tier], self._pool.used_bytes(tier))
            capacity.add_metric([tier], self._capacity_bytes.get(tier, 0))
            evicted.add_metric([tier], self._pool.num_evicted[tier])
        yield from (blocks, used, capacity, evicted)
