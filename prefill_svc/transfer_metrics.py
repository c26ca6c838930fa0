"""What a prefill worker has sent, and moved from and to the store, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.kv_transfer.sender import SendCounts
from engine.kv_transfer.store_loader import LoadCounts
from engine.kv_transfer.traffic_metrics import copy_traffic, store_moved, store_traffic
from engine.kv_transfer.write_back import WriteBackCounts


class SendMetrics(Collector):
    def __init__(self, counts: SendCounts, loads: LoadCounts, writes: WriteBackCounts | None) -> None:
        self._counts, self._loads, self._writes = counts, loads, writes or WriteBackCounts()

    def describe(self) -> list[Metric]:
        """None ahead of time: a test may hold several workers in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, value in (
            ("shoal_kv_sent_transfers", "hand-offs completed", counts.num_transfers),
            ("shoal_kv_sent_blocks", "blocks pushed to decode workers", counts.num_blocks),
            ("shoal_kv_sent_bytes", "bytes pushed to decode workers", counts.num_bytes),
            ("shoal_kv_sent_computed_tokens", "tokens computed for hand-offs", counts.num_tokens_computed),
            ("shoal_kv_sent_cached_tokens", "tokens of hand-offs taken from cache or store", counts.num_tokens_cached),
        ):
            yield CounterMetricFamily(name, text, value)
        sent = [("send", transport, float(copied.num_bytes), copied.seconds)
                for transport, copied in list(counts.copies.items())]
        yield from copy_traffic([*sent, *store_moved(self._loads, self._writes)])
        yield from store_traffic(self._loads, self._writes)
