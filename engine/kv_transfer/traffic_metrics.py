"""KV that a worker moves, as Prometheus metrics that decode and prefill workers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from common.bucket_counts import BucketCounts
from engine.kv_transfer.store_loader import LoadCounts
from engine.kv_transfer.write_back import WriteBackCounts

Moved = tuple[str, str, float, BucketCounts]  # direction, transport, bytes, seconds of each copy


def copy_traffic(moved: Iterable[Moved]) -> Iterator[Metric]:
    """Bytes over seconds is the rate while bytes move; the wait for a step that fills blocks is not in it."""
    labels = ["direction", "transport"]
    num_bytes = CounterMetricFamily("shoal_kv_copy_bytes", "KV bytes moved", labels=labels)
    seconds = HistogramMetricFamily("shoal_kv_copy_seconds", "time of one copy or call that moved KV", labels=labels)
    for direction, transport, total, counts in moved:
        num_bytes.add_metric([direction, transport], total)
        counts.add_to(seconds, [direction, transport])
    yield from (num_bytes, seconds)


def store_moved(loads: LoadCounts, writes: WriteBackCounts) -> list[Moved]:
    return [("load", "store", loads.num_bytes, loads.copies), ("write", "store", writes.num_bytes, writes.copies)]


def store_traffic(loads: LoadCounts, writes: WriteBackCounts) -> Iterator[Metric]:
    for name, text, value in (
        ("shoal_kv_store_loads", "loads from the store", loads.num_loads),
        ("shoal_kv_store_loaded_blocks", "blocks loaded from the store", loads.num_blocks),
        ("shoal_kv_store_loaded_bytes", "bytes loaded from the store", loads.num_bytes),
        ("shoal_kv_store_declined", "loads left out because computing is faster", loads.num_declined),
        ("shoal_kv_store_written_blocks", "blocks written back to the store", writes.num_blocks),
        ("shoal_kv_store_written_bytes", "bytes written back to the store", writes.num_bytes),
        ("shoal_kv_store_dropped_blocks", "blocks not written back", writes.num_dropped_blocks),
    ):
        yield CounterMetricFamily(name, text, value)
    yield GaugeMetricFamily("shoal_kv_store_load_bytes_per_second", "smoothed rate", loads.bytes_per_s)
