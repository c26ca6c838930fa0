"""What a decode worker took in from prefill workers and the store, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from decode_svc.admission import AdmissionCounts
from engine.kv_transfer.receiver import TransferCounts
from engine.kv_transfer.store_loader import LoadCounts
from engine.kv_transfer.traffic_metrics import copy_traffic, store_moved, store_traffic
from engine.kv_transfer.write_back import WriteBackCounts


class TransferMetrics(Collector):
    def __init__(
        self, received: Mapping[str, TransferCounts], loads: LoadCounts, writes: WriteBackCounts | None,
        admissions: AdmissionCounts,
    ) -> None:
        self._received, self._loads, self._admissions = received, loads, admissions
        self._writes = writes or WriteBackCounts()

    def describe(self) -> list[Metric]:
        """None ahead of time: a test may hold several workers in one process."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._received_metrics()
        received = [("receive", transport, float(counts.num_bytes), counts.copies)
                    for transport, counts in list(self._received.items())]
        yield from copy_traffic([*received, *store_moved(self._loads, self._writes)])
        yield from store_traffic(self._loads, self._writes)
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
            for transport, counts in list(self._received.items()):
                family.add_metric([transport], getattr(counts, field))
            yield family
        hand_offs = HistogramMetricFamily(
            "shoal_kv_hand_off_seconds", "asked for a slot to the last block, of hand-offs that ended well",
            labels=["transport"])
        for transport, counts in list(self._received.items()):
            counts.hand_offs.add_to(hand_offs, [transport])
        yield hand_offs
