"""What 100 decode steps do, by torch's profiler: nothing that waits, one graph a step, and next to no idle GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench.figures import Figure
from bench.gpu_engine.rig import Rig
from bench.serve import workloads

_MARK = "decode steps"
_BATCH, _CONTEXT, _STEPS, _LEAD = 64, 1024, 100, 30
_IDLE_LIMIT = 0.02
_FIRST_KERNEL, _LAST_KERNEL = "_gather_kernel", "_advance_kernel"  # of a decode graph
_WAITS = frozenset({"cudaMemcpy", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaFree"})


@dataclass(frozen=True, slots=True)
class Profile:
    """`kernels`: (start, end, name) in microseconds on the GPU. `calls` of CUDA in the steps, by name."""

    kernels: list[tuple[float, float, str]]
    calls: dict[str, int]

    def between_graphs(self) -> float:
        """Part of the time from the first graph to the last in which none runs."""
        firsts = [start for start, _, name in self.kernels if name == _FIRST_KERNEL]
        lasts = [end for _, end, name in self.kernels if name == _LAST_KERNEL]
        if len(firsts) < 2 or len(firsts) != len(lasts):
            raise RuntimeError(f"the profile has {len(firsts)} beginnings and {len(lasts)} ends of graphs")
        gaps = sum(start - end for end, start in zip(lasts, firsts[1:], strict=False))
        return gaps / (lasts[-1] - firsts[0])

    @property
    def num_waits(self) -> int:
        """Calls that wait for the GPU, and copies from and to memory that is not pinned."""
        return sum(self.calls.get(name, 0) for name in _WAITS) + sum(
            1 for *_, name in self.kernels if "Memcpy" in name and "Pageable" in name)


def measure(rig: Rig) -> Iterator[Figure]:
    rig.fresh()
    names = [rig.add(request) for request in workloads.random(_BATCH, _CONTEXT, 2 * _STEPS + _LEAD + 40)]
    for _ in range(_LEAD):
        rig.core.step()
    before = rig.runner.num_eager_steps, rig.runner.num_graph_steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function(_MARK):
            for _ in range(_STEPS):
                rig.core.step()
        torch.cuda.synchronize()
    eager = rig.runner.num_eager_steps - before[0]
    graphs = rig.runner.num_graph_steps - before[1]
    for name in names:
        rig.core.abort(name)
    while rig.core.has_work:
        rig.core.step()
    seen = read(profiler.events())
    launches = seen.calls.get("cudaGraphLaunch", 0)
    if eager or graphs != _STEPS or launches > _STEPS or seen.num_waits:
        raise RuntimeError(
            f"{_STEPS} decode steps: {eager} ran kernel by kernel, {graphs} as graphs, {launches} graphs were "
            f"launched, {seen.num_waits} calls waited for the GPU; {dict(sorted(seen.calls.items()))}")
    idle = seen.between_graphs()
    yield Figure("calls that wait for the GPU, 100 decode steps", seen.num_waits, "calls")
    yield Figure("graph launches, 100 decode steps", launches, "launches")
    yield Figure(f"idle GPU between decode graphs, B={_BATCH}", idle, "of the time", "limit", _IDLE_LIMIT,
                 _IDLE_LIMIT / max(idle, 1e-9), 1.0)


def read(events: Any) -> Profile:
    """From what torch's profiler recorded."""
    kernels, calls = [], dict[str, int]()
    on_gpu = [str(event.device_type).endswith("CUDA") for event in events]
    steps = next(e.time_range for e, is_gpu in zip(events, on_gpu, strict=True) if e.name == _MARK and not is_gpu)
    for event, is_gpu in zip(events, on_gpu, strict=True):
        if is_gpu:
            kernels.append((event.time_range.start, event.time_range.end, event.name))
        elif event.name.startswith("cu") and steps.start <= event.time_range.start <= steps.end:
            calls[event.name] = calls.get(event.name, 0) + 1
    return Profile(sorted(kernels), calls)
