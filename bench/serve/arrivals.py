"""When requests come in an open loop: a renewal process with gamma gaps, as in `vllm bench serve`.

Unlike there the gaps are not stretched afterwards to hit the rate exactly: the process stays what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bench.serve.workloads import BenchRequest


def arrival_times(n: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start, rising. Gaps have the mean `1 / rate` and the squared variation `1 / burstiness`.

    1 is a Poisson process, below 1 comes in bursts, infinity is a metronome. Rate infinity: all at once.
    """
    if math.isinf(rate):
        return [0.0] * n
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(n)]
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / (rate * burstiness), n)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def spread(requests: Sequence[BenchRequest], rate: float, burstiness: float, seed: int) -> list[BenchRequest]:
    """The same requests at drawn times; turns that follow another keep their own."""
    firsts = sum(request.follows is None for request in requests)
    times = iter(arrival_times(firsts, rate, burstiness, seed))
    return [replace(request, arrival=next(times)) if request.follows is None else request for request in requests]
