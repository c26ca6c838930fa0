"""What a run is asked to do, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from common.errors import ConfigError

COMPLETIONS, CHAT = "openai", "openai-chat"  # as vLLM names them
PATHS: Final = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
DATASETS: Final = ("random", "mixed", "poisson", "shared_prefix", "interference", "multi_turn", "custom", "timed_trace")
_TIMED: Final = ("poisson", "interference", "timed_trace")  # have arrivals of their own
_FILES: Final = ("custom", "timed_trace")


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """None: the workload's own default."""

    name: str = "random"
    path: Path | None = None
    num_prompts: int | None = None
    input_len: int | None = None
    output_len: int | None = None
    prefix_len: int | None = None
    num_turns: int = 4
    think_s: float = 0.0
    duration_s: float = 20.0  # of `poisson`
    num_streams: int = 64  # of `interference`
    long_prompt_every_s: float = 0.5
    vocab_size: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise _bad("dataset_name", f"must be one of {', '.join(DATASETS)}, got {self.name!r}")
        if (self.path is not None) != (self.name in _FILES):
            raise _bad("dataset_path", f"needed for {' and '.join(_FILES)}, and only there")
        for name in ("num_prompts", "input_len", "output_len", "prefix_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad(name, f"must be at least 1, got {value}")
        if self.name == "mixed" and (self.input_len or self.output_len):
            raise _bad("input_len", "the mixed workload has fixed ranges: choose another, or leave the lengths out")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One run. `request_rate` is in requests per second, infinity: as fast as `max_concurrency` lets them go."""

    url: str
    model: str
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    endpoint_type: str = COMPLETIONS
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_warmups: int = 0
    temperature: float | None = None
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = ""
    deadline_s: float = 600.0
    max_seconds: float = math.inf
    lag_limit_ms: float = 10.0
    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    goodput: Mapping[str, float] = field(default_factory=dict)
    label: str = ""
    tokenizer: str = ""

    def __post_init__(self) -> None:
        if self.endpoint_type not in PATHS:
            raise _bad("endpoint_type", f"must be one of {', '.join(PATHS)}, got {self.endpoint_type!r}")
        for name in ("request_rate", "burstiness", "deadline_s", "max_seconds", "lag_limit_ms"):
            value = getattr(self, name)
            if not value > 0:
                raise _bad(name, f"must be more than 0, got {value:g}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise _bad("max_concurrency", f"must be at least 1, got {self.max_concurrency}")
        self._check_arrivals()

    def _check_arrivals(self) -> None:
        name = self.dataset.name
        if name == "poisson" and math.isinf(self.request_rate):
            raise _bad("request_rate", "the poisson workload needs one")
        if name in _TIMED and self.burstiness != 1:
            raise _bad("burstiness", f"the {name} workload has its own arrivals")
        if name in ("interference", "timed_trace") and not math.isinf(self.request_rate):
            raise _bad("request_rate", f"the {name} workload has its own arrivals")

    @property
    def has_rate(self) -> bool:
        """Whether requests come at their own times, not only as slots come free."""
        return self.has_own_arrivals or not math.isinf(self.request_rate)

    @property
    def has_own_arrivals(self) -> bool:
        return self.dataset.name in _TIMED


def parse_goodput(texts: list[str]) -> dict[str, float]:
    """`["ttft:500", "tpot:30 e2el:9000"]` → limits in ms. Raises `ConfigError`."""
    limits: dict[str, float] = {}
    for text in " ".join(texts).split():
        name, _, number = text.partition(":")
        value = _number("goodput", number)
        if name not in ("ttft", "tpot", "e2el") or not value > 0:
            raise _bad("goodput", f"each must be ttft:MS, tpot:MS or e2el:MS with MS > 0, got {text!r}")
        limits[name] = value
    return limits


def parse_percentiles(text: str) -> tuple[float, ...]:
    """`"50,99.9"` → the numbers, rising. Raises `ConfigError`."""
    values = sorted({_number("metric_percentiles", part) for part in text.split(",")})
    if not all(0 < value <= 100 for value in values):
        raise _bad("metric_percentiles", f"each must be above 0 and at most 100, got {text!r}")
    return tuple(values)


def _number(param: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise _bad(param, f"not a number: {text!r}") from None


def _bad(param: str, why: str) -> ConfigError:
    return ConfigError(f"--{param.replace('_', '-')}: {why}", param=param)
