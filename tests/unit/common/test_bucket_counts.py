"""A histogram with weights, as prometheus_client would have counted it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.bucket_counts import BucketCounts
from common.exposition import encoder

BOUNDS = (.1, 1, 10)
TRACE = {"trace_id": "a" * 32, "span_id": "b" * 16}


class _One(Collector):
    def __init__(self, counts: BucketCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily("h", "text", labels=["l"])
        self._counts.add_to(family, ["x"])
        yield family


def shown(counts: BucketCounts, accept: str = "application/openmetrics-text; version=1.0.0") -> str:
    registry = CollectorRegistry()
    registry.register(_One(counts))
    return encoder(accept)[0](registry).decode()


def test_a_weight_counts_as_that_many_observations() -> None:
    ours, theirs = BucketCounts(BOUNDS), Histogram("h", "text", ["l"], registry=None, buckets=BOUNDS)
    for value, weight in ((.05, 1), (.1, 3), (.5, 2), (10, 1), (11, 4)):
        ours.observe(value, weight)
        for _ in range(weight):
            theirs.labels("x").observe(value)
    expected = {(s.name, s.labels.get("le")): s.value for m in theirs.collect() for s in m.samples}
    found = {(s.name, s.labels.get("le")): s.value for m in _One(ours).collect() for s in m.samples}
    assert {k: v for k, v in expected.items() if not k[0].endswith("_created")} == found
    assert (ours.count, round(ours.sum, 6)) == (11, round(.05 + .3 + 1 + 10 + 44, 6))


def test_the_newest_exemplar_of_a_bucket_is_shown_in_open_metrics_alone() -> None:
    counts = BucketCounts(BOUNDS)
    counts.observe(.2, exemplar={"trace_id": "old"})
    counts.observe(.3, exemplar=TRACE)
    counts.observe(20)
    lines = shown(counts).splitlines()
    (line,) = [line for line in lines if 'le="1.0"' in line]
    assert f'2.0 # {{span_id="{TRACE["span_id"]}",trace_id="{TRACE["trace_id"]}"}} 0.3' in line
    assert not any("#" in line for line in lines if 'le="+Inf"' in line)
    assert "trace_id" not in shown(counts, "text/plain")
