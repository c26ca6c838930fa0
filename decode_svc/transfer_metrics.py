"""What a decode worker took in from prefill workers and the store, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from decode_svc.admission import AdmissionCounts
from engine.kv_transfer.receiver import TransferCounts
from engine.kv_transfer.store_loader import LoadCounts
from engine.kv_transfer.write_back import WriteBackCounts


class TransferMetrics(Collector):
    def __init__(
        self, received: Mapping[str, TransferCounts], loads: LoadCounts, writes: WriteBackCounts | None,
        admissions: AdmissionCounts,
    ) -> None:
        self._received, self._loads, self._writes, self._admissions = received, loads, writes, admissions

    def collect(self) -> Iterator[Metric]:
        yield from self._received_metrics()
        yield from self._store_metrics()
        how = CounterMetricFamily("shoal_admissions", "requests by how their prompt came in", labels=["how"])
        how.add_metric(["plain"], self._admissions.num_plain)
        how.add_metric(["reserved"], self._admissions.num_reserved)
        how.add_metric(["no_room"], self._admissions.num_no_room)
        yield how

    def _received_metrics(self) -> Iterator[Metric]:
        for name, text, field in (
            ("shoal_kv_transfers", "hand-offs begun", "num_transfers"),
            ("shoal_kv_transfer_fallbacks", "hand-offs that ended early", "num_fallbacks"),
            ("shoal_kv_transfer_blocks", "blocks taken in", "num_blocks"),
            ("shoal_kv_transfer_bytes", "bytes taken in", "num_bytes"),
            ("shoal_kv_transfer_overlapped", "hand-offs that landed a block before the prompt was computed",
             "num_overlapped"),
            ("shoal_kv_transfer_copy_seconds", "time of copies into blocks", "seconds"),
        ):
            family = CounterMetricFamily(name, text, labels=["transport"])
            for transport, counts in self._received.items():
                family.add_metric([transport], getattr(counts, field))
            yield family

    def _store_metrics(self) -> Iterator[Metric]:
        loads, writes = self._loads, self._writes or WriteBackCounts()
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
