"""What is read from a profile of decode steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu_engine.steady_steps import Profile, read


def event(name: str, start: float, end: float, device: str = "DeviceType.CPU") -> Any:
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def kernel(name: str, start: float, end: float) -> Any:
    return event(name, start, end, "DeviceType.CUDA")


def test_only_cuda_calls_within_the_steps_are_counted() -> None:
    seen = read([
        event("cudaGraphLaunch", 5, 6), event("decode steps", 10, 100), event("cudaGraphLaunch", 12, 13),
        event("cudaGraphLaunch", 50, 51), event("aten::copy_", 52, 53), event("cudaDeviceSynchronize", 101, 102),
        kernel("decode steps", 11, 99)])
    assert seen.calls == {"cudaGraphLaunch": 2}
    assert seen.num_waits == 0


@pytest.mark.parametrize("waiting", [
    event("cudaStreamSynchronize", 20, 30), event("cudaMemcpy", 20, 30),
    kernel("Memcpy DtoH (Device -> Pageable)", 20, 30)])
def test_a_call_that_waits_and_a_copy_of_pageable_memory_are_seen(waiting: Any) -> None:
    assert read([event("decode steps", 10, 100), waiting]).num_waits == 1


def test_the_idle_time_is_what_lies_between_graphs() -> None:
    seen = Profile([(0, 1, "_gather_kernel"), (1, 50, "gemm"), (50, 60, "_advance_kernel"), (61, 62, "Memcpy"),
                    (70, 71, "_gather_kernel"), (71, 90, "at::vectorized_gather_kernel"),
                    (90, 100, "_advance_kernel")], {})
    assert seen.between_graphs() == pytest.approx(0.1)


def test_a_profile_without_graphs_is_refused() -> None:
    with pytest.raises(RuntimeError, match="0 beginnings and 0 ends"):
        Profile([(0, 1, "gemm")], {}).between_graphs()
