"""Utilisation and memory of this host's GPUs, read by NVML at scrape time.

Without the package `nvidia-ml-py`, a driver or a GPU there are no series and no error.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common import logs

log = logs.get(__name__)

_FAMILIES = (
    ("shoal_gpu_utilization_ratio", "share of the last sample period in which a kernel ran, 0 to 1"),
    ("shoal_gpu_memory_used_bytes", "GPU memory in use, by all processes"),
    ("shoal_gpu_memory_capacity_bytes", "GPU memory"),
    ("shoal_gpu_power_watts", "power drawn"),
    ("shoal_gpu_temperature_celsius", "temperature of the GPU"),
)


def open_nvml() -> Any | None:
    """The NVML binding, initialised; None where there is none."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except Exception as error:  # the binding raises classes of its own: no driver, no library, no permission
        log.debug("nvml_not_available", error=repr(error))
        return None
    return nvml


class GpuMetrics(Collector):
    """One label, the GPU's index. Restricted to `CUDA_VISIBLE_DEVICES` where that lists indices."""

    def __init__(self, nvml: Any | None = None) -> None:
        self._nvml = open_nvml() if nvml is None else nvml

    @staticmethod
    def names() -> frozenset[str]:
        """Of all metrics that there are with a GPU."""
        return frozenset(name for name, _ in _FAMILIES)

    def describe(self) -> list[Metric]:
        """None ahead of time: registering must not call the driver."""
        return []

    def collect(self) -> Iterator[Metric]:
        if self._nvml is None:
            return
        families = [GaugeMetricFamily(name, text, labels=["gpu"]) for name, text in _FAMILIES]
        for index in self._indices():
            for family, value in zip(families, self._read(index), strict=True):
                if value is not None:
                    family.add_metric([str(index)], value)
        yield from families

    def _indices(self) -> list[int]:
        count = int(self._nvml.nvmlDeviceGetCount()) if self._nvml is not None else 0
        listed = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        if all(part.isdigit() for part in listed):
            return [index for index in map(int, listed) if index < count]
        return list(range(count))

    def _read(self, index: int) -> tuple[float | None, ...]:
        """In the order of the families; None for what this GPU does not tell."""
        nvml = self._nvml
        assert nvml is not None
        device = nvml.nvmlDeviceGetHandleByIndex(index)

        def told(ask: Any, *arguments: Any) -> Any:
            try:
                return ask(device, *arguments)
            except nvml.NVMLError:
                return None

        use, memory = told(nvml.nvmlDeviceGetUtilizationRates), told(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts = told(nvml.nvmlDeviceGetPowerUsage)
        return (
            None if use is None else use.gpu / 100, None if memory is None else float(memory.used),
            None if memory is None else float(memory.total), None if milliwatts is None else milliwatts / 1000,
            told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU))
