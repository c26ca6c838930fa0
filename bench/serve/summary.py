"""Figures of a run from its records. Only completed requests are in the percentiles; all others are counted apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.serve.record import Outcome, RequestRecord

METRICS: Final = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Spread:
    """In ms; NaN where there is no value."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Summary:
    """Rates are per second of the whole run. `goodput`: completed requests within all limits; None: no limits."""

    duration_s: float
    outcomes: Mapping[Outcome, int]
    refused_by_status: Mapping[int, int]
    total_input_tokens: int
    total_output_tokens: int
    cached_input_tokens: int
    goodput: float | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    num_resent: int
    queue: Spread  # for a slot below the limit of requests at once, of all that were sent
    spreads: Mapping[str, Spread]

    @property
    def completed(self) -> int:
        return self.outcomes.get(Outcome.COMPLETED, 0)

    @property
    def has_queued(self) -> bool:
        """Whether any request waited for a slot."""
        return self.queue.mean > 0

    @property
    def not_completed(self) -> int:
        return sum(self.outcomes.values()) - self.completed

    def rate(self, count: float) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0


def summarize(
    records: Sequence[RequestRecord], duration_s: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> Summary:
    """`goodput`: limits in ms by metric name; a TPOT of a single token counts as 0."""
    done = [record for record in records if record.outcome is Outcome.COMPLETED]
    good = sum(is_good(record, goodput) for record in done)
    values = values_ms(done)
    return Summary(
        duration_s=duration_s, outcomes=Counter(record.outcome for record in records),
        refused_by_status=Counter(r.status for r in records if r.outcome is Outcome.REFUSED),
        total_input_tokens=sum(record.input_len for record in done),
        total_output_tokens=sum(record.output_len for record in done),
        cached_input_tokens=sum(record.num_cached_tokens or 0 for record in done),
        goodput=good / duration_s if goodput and duration_s > 0 else None,
        max_output_tokens_per_s=max(tokens_by_second(done), default=0.0),
        max_concurrent_requests=max_concurrent(records), num_resent=sum(record.num_resent for record in records),
        queue=_spread([r.queue_s * 1000 for r in records if r.outcome is not Outcome.NOT_SENT], percentiles),
        spreads={name: _spread(values[name], percentiles) for name in METRICS})


def is_good(record: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    seen = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2el_s}
    return all(seen[name] * 1000 <= limit for name, limit in limits_ms.items())


def values_ms(done: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """By metric: one value a request, of `itl` one a gap."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for record in done:
        values["ttft"].append(record.ttft_s * 1000)
        values["e2el"].append(record.e2el_s * 1000)
        values["itl"] += [gap * 1000 for gap in record.itls_s]
        if record.tpot_s is not None:
            values["tpot"].append(record.tpot_s * 1000)
    return values


def tokens_by_second(done: Sequence[RequestRecord]) -> list[float]:
    """Output tokens in each second of the run; a request's tokens are spread evenly over its chunks."""
    seconds = [0.0] * (1 + int(max((r.chunk_s[-1] for r in done if r.chunk_s), default=-1.0)))
    for record in done:
        for at in record.chunk_s:
            seconds[int(at)] += record.output_len / len(record.chunk_s)
    return seconds


def max_concurrent(records: Sequence[RequestRecord]) -> int:
    """Most requests under way at one instant; one that ends as another begins does not overlap it."""
    sent = [record for record in records if record.outcome is not Outcome.NOT_SENT]
    changes = sorted([(record.sent_s, 1) for record in sent] + [(record.end_s, -1) for record in sent])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _spread(values: Sequence[float], percentiles: Sequence[float]) -> Spread:
    if not values:
        nan = float("nan")
        return Spread(nan, nan, nan, dict.fromkeys(percentiles, nan))
    array = np.asarray(values)
    return Spread(float(array.mean()), float(np.median(array)), float(array.std()),
                  {q: float(np.percentile(array, q)) for q in percentiles})
