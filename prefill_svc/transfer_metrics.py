"""What a prefill worker has sent, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.kv_transfer.sender import SendCounts


class SendMetrics(Collector):
    def __init__(self, counts: SendCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        yield CounterMetricFamily("shoal_kv_sent_transfers", "hand-offs completed", counts.num_transfers)
        yield CounterMetricFamily("shoal_kv_sent_blocks", "blocks pushed to decode workers", counts.num_blocks)
        yield CounterMetricFamily("shoal_kv_sent_bytes", "bytes pushed to decode workers", counts.num_bytes)
        yield CounterMetricFamily(
            "shoal_kv_sent_computed_tokens", "tokens computed for hand-offs", counts.num_tokens_computed)
        yield CounterMetricFamily(
            "shoal_kv_sent_cached_tokens", "tokens of hand-offs taken from cache or store", counts.num_tokens_cached)
