"""The time of a kernel as a captured step sees it: launched from a CUDA graph, on memory that no cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.figures import Figure
from common.errors import ConfigError

Act = Callable[[], object]
_ROUNDS = 9
_COLD_BYTES = 128 << 20  # more than the caches hold


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in the same run."""

    bytes_per_s: float
    flops_per_s: float


def check_gpu() -> None:
    """Raises `ConfigError` where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("shoal bench kernels needs an NVIDIA GPU, and torch sees none here", param="device")


def copies_needed(num_bytes: int) -> int:
    """How many sets of operands make each launch find cold caches."""
    return max(2, min(256, -(-_COLD_BYTES // max(1, num_bytes))))


def seconds(acts: Sequence[Act]) -> float:
    """Of one act, the median over replays of a graph of all. They run once before, to be compiled."""
    for act in (acts[0], acts[-1]):
        act()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for act in acts:
            act()
    graph.replay()
    times: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(acts))
    return statistics.median(times)


def moved(
    name: str, num_bytes: int, ours: Sequence[Act], ceilings: Ceilings, peer: str = "",
    theirs: Sequence[Act] | None = None,
) -> list[Figure]:
    """A kernel that is bound by memory: its time beside a library's, and its rate beside a copy's."""
    time_s = seconds(ours)
    peer_s = seconds(theirs) if theirs else None
    rate = num_bytes / time_s
    return [Figure(f"{name}, time", time_s * 1e6, "us", peer, None if peer_s is None else peer_s * 1e6,
                   None if peer_s is None else peer_s / time_s),
            Figure(f"{name}, rate", rate / 1e12, "TB/s", "copy", ceilings.bytes_per_s / 1e12,
                   rate / ceilings.bytes_per_s)]


def computed(
    name: str, num_flops: float, ours: Sequence[Act], ceilings: Ceilings, peer: str, theirs: Sequence[Act]
) -> list[Figure]:
    """A kernel that is bound by arithmetic: its time beside a library's, and its rate beside a matrix product's."""
    time_s, peer_s = seconds(ours), seconds(theirs)
    rate = num_flops / time_s
    return [Figure(f"{name}, time", time_s * 1e6, "us", peer, peer_s * 1e6, peer_s / time_s),
            Figure(f"{name}, rate", rate / 1e12, "TFLOP/s", "matrix product", ceilings.flops_per_s / 1e12,
                   rate / ceilings.flops_per_s)]
