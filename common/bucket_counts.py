"""A histogram that its owner fills and a collector reads at scrape time.

It differs from prometheus_client's own in two ways: one call counts several equal observations (all rows of an engine
step have the same gap), and one set of counts can be shown under two names.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import Exemplar, HistogramMetricFamily


class BucketCounts:
    """One writer; a reader in another thread sees whole buckets, its sum may be one observation behind.

    `bounds` are the upper limits (inclusive), ascending; +Inf is added.
    """

    __slots__ = ("_bounds", "_counts", "_exemplars", "_names", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._counts = [0] * (len(self._bounds) + 1)
        self._exemplars: dict[int, Exemplar] = {}  # bucket → the newest one with a trace
        self._sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def sum(self) -> float:
        return self._sum

    def observe(self, value: float, weight: int = 1, exemplar: dict[str, str] | None = None) -> None:
        """Count `weight` observations of `value`."""
        bucket = bisect_left(self._bounds, value)
        self._counts[bucket] += weight
        self._sum += value * weight
        if exemplar is not None:
            self._exemplars[bucket] = Exemplar(exemplar, value, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """As one sample set of a family."""
        cumulated = accumulate(list(self._counts))
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
        for i, (name, total) in enumerate(zip(self._names, cumulated, strict=True)):
            exemplar = self._exemplars.get(i)
            buckets.append((name, total) if exemplar is None else (name, total, exemplar))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)
