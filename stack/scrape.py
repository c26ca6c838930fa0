"""Prometheus metrics of a process, read over HTTP."""

from __future__ import annotations

import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from common.errors import Unavailable

_TIMEOUT_S = 5.0


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


def samples(address: str) -> list[Sample]:
    """All of a process's samples but histogram buckets. `address` is host:port.

    Raises `Unavailable` when nothing answers there.
    """
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise Unavailable(f"no metrics at {address}: {error}") from None
    return [Sample(sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text) for sample in family.samples
            if not sample.name.endswith(("_bucket", "_created"))]


def summed(found: Iterable[Sample]) -> dict[str, float]:
    """Sample name → value, summed over label sets."""
    values: defaultdict[str, float] = defaultdict(float)
    for sample in found:
        values[sample.name] += sample.value
    return dict(values)


def scrape(address: str) -> dict[str, float]:
    """The sums of `samples`. Raises `Unavailable` when nothing answers there."""
    return summed(samples(address))
