"""GPU series, from an NVML that answers, one that answers in part, and none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from common.gpu_metrics import GpuMetrics, open_nvml


class FakeNvml:
    """Two GPUs; the second does not tell its power."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=25 * (device + 1))

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=10 + device, total=100)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:  # noqa: N802
        if device:
            raise FakeNvml.NVMLError
        return 70_000

    def nvmlDeviceGetTemperature(self, device: int, _kind: int) -> int:  # noqa: N802
        return 40


def series(nvml: object | None) -> dict[tuple[str, str], float]:
    registry = CollectorRegistry()
    metrics = GpuMetrics(nvml)
    registry.register(metrics)
    return {(s.name, s.labels["gpu"]): s.value for m in registry.collect() for s in m.samples}


def test_each_gpu_has_its_series_but_for_what_it_does_not_tell() -> None:
    found = series(FakeNvml())
    assert found["shoal_gpu_utilization_ratio", "1"] == .5
    assert found["shoal_gpu_memory_used_bytes", "0"] == 10
    assert found["shoal_gpu_power_watts", "0"] == 70
    assert ("shoal_gpu_power_watts", "1") not in found
    assert {name for name, _ in found} == GpuMetrics.names()


def test_only_the_gpus_that_the_process_may_use_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert {gpu for _, gpu in series(FakeNvml())} == {"1"}


def test_without_nvml_there_are_no_series_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert open_nvml() is None
    assert series(None) == {}
