"""All that `shoal bench engine --shape` measures, in order: outputs and ceilings first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from bench.figures import Figure
from bench.gpu_engine import ceilings, offline_runs, online_runs, outputs_check, steady_steps
from bench.gpu_engine.rig import Rig
from bench.gpu_engine.shapes import SHAPES, shape
from bench.gpu_engine.structured_steps import structured
from common.errors import ConfigError
from engine.device import find_device

Say = Callable[..., object]
WORKLOADS: Final[dict[str, Callable[[Rig, str], Iterator[Figure]]]] = {
    "decode": offline_runs.decode, "prefill": offline_runs.prefill, "mixed": offline_runs.mixed,
    "shared_prefix": offline_runs.shared_prefix, "structured": structured, "poisson": online_runs.poisson,
    "interference": online_runs.interference}
_READY_LIMIT_S = 120.0


def measure(name: str, workloads: Sequence[str], device: str, say: Say) -> list[Figure]:
    """`workloads`: of `WORKLOADS`, or `all`. `say` is told of progress and of each figure.

    Raises `ConfigError`, and `RuntimeError` for what is not right.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}", param="shape")
    for workload in workloads:
        if workload not in (*WORKLOADS, "all"):
            raise ConfigError(
                f"workload must be one of {', '.join(WORKLOADS)}, all; got {workload!r}", param="workload")
    found = find_device(device)
    if not found.is_gpu:
        raise ConfigError(f"device={device}: a shape is measured on a GPU, and there is none", param="device")
    figures: list[Figure] = []
    chosen = list(WORKLOADS) if "all" in workloads else workloads
    for figure in _figures(name, chosen, found.name, say):
        say("figure", name=figure.name, value=figure.value, unit=figure.unit, peer=figure.peer_value, ok=figure.ok)
        figures.append(figure)
    return figures


def _figures(name: str, workloads: Sequence[str], device: str, say: Say) -> Iterator[Figure]:
    yield from outputs_check.measure(name, torch.device(device))
    gc.collect()
    torch.cuda.empty_cache()
    yield from ceilings.measure(torch.device(device))
    rig = Rig(shape(name), device, say)
    yield Figure("start to ready", rig.ready_s, "s", "limit", _READY_LIMIT_S, _READY_LIMIT_S / rig.ready_s, 1.0)
    yield from steady_steps.measure(rig)
    for workload in workloads:
        yield from WORKLOADS[workload](rig, name)
    rig.fresh()
    yield Figure("requests served whole", rig.num_served, "requests")
    for kernel in rig.late:
        say("kernel_compiled_late", kernel=kernel)
    yield Figure("kernels compiled after the start", len(rig.late), "kernels", "limit", 0.0, float(not rig.late), 1.0)
