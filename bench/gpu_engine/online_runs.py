"""Runs in which requests come by the clock, whether the engine keeps up or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from bench.figures import Figure
from bench.gpu_engine.peer import beside_peer
from bench.gpu_engine.rig import Rig, Served
from bench.serve import workloads

_RATES = (4, 16, 32, 48)
_GOOD_TTFT_S, _GOOD_TPOT_S = 0.5, 0.03


def poisson(rig: Rig, shape: str) -> Iterator[Figure]:
    """20 s at each rate; good: TTFT < 500 ms and TPOT < 30 ms."""
    for rate in _RATES:
        rig.fresh()
        _, served = rig.run(workloads.poisson(rate))
        yield from _latencies(shape, f"poisson {rate}/s", served, tpot=True)
        good = np.mean([s.ttft_s < _GOOD_TTFT_S and s.tpot_s < _GOOD_TPOT_S for s in served])
        yield beside_peer(shape, f"poisson {rate}/s, good", float(good), "of requests")


def interference(rig: Rig, shape: str) -> Iterator[Figure]:
    """64 steady answers alone, then while a prompt of 16k tokens comes every half second."""
    for num_long, name in ((0, "64 streams alone"), (16, "64 streams beside 16k prompts")):
        rig.fresh()
        requests = workloads.interference(count=num_long)
        _, served = rig.run(requests)
        is_long = [request.group == "long prompts" for request in requests]
        yield from _latencies(shape, name, [s for s, long in zip(served, is_long, strict=True) if not long])
        if num_long:
            yield from _latencies(shape, "16k prompts", [s for s, long in zip(served, is_long, strict=True) if long])


def _latencies(shape: str, name: str, served: Sequence[Served], *, tpot: bool = False) -> Iterator[Figure]:
    """In milliseconds."""
    ttfts, gaps = [s.ttft_s for s in served], [gap for s in served for gap in s.gaps_s]
    columns = [("TTFT p50", ttfts, 50), ("TTFT p99", ttfts, 99), ("ITL p50", gaps, 50), ("ITL p99", gaps, 99)]
    if tpot:
        columns.append(("TPOT p99", [s.tpot_s for s in served], 99))
    for column, values, quantile in columns:
        yield beside_peer(shape, f"{name}, {column}", float(np.percentile(values, quantile)) * 1e3, "ms")
