"""What deciding costs, with a model that costs nothing: steps, admission, and slots that stay unused."""

from __future__ import annotations

import statistics
import time

import numpy as np

from bench.engine_area.engines import IdleRunner, idle_core, prompt
from bench.figures import Figure
from common.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.garbage import spare_collector
from engine.request import EngineRequest

_STEP_LIMITS_US = {256: 300.0, 1024: 800.0}
_ADMISSION_LIMIT_US = 200.0
_UNUSED_LIMIT = 0.04
_STEP_BLOCK_SIZE = 64  # the default on a GPU, where these batch sizes are


def measure(*, quick: bool) -> list[Figure]:
    """Times in microseconds against the limits that an engine on a GPU can bear, garbage as in an engine's process."""
    spare_collector()
    steps = 60 if quick else 300
    return [*(_limited(f"scheduler step, {batch} decode", _step_us(batch, steps), limit)
              for batch, limit in _STEP_LIMITS_US.items()),
            _limited("admission of a 512-token prompt", _admission_us(40 if quick else 200), _ADMISSION_LIMIT_US),
            _unused_slots(128 if quick else 512)]


def _limited(name: str, value_us: float, limit_us: float) -> Figure:
    return Figure(name, value_us, "us", "limit", limit_us, limit_us / value_us, 1.0)


def _step_us(batch: int, num_steps: int) -> float:
    """Median of a whole `EngineCore.step` in which all decode."""
    config = EngineConfig(
        block_size=_STEP_BLOCK_SIZE, num_blocks=batch * 20, max_num_seqs=batch, max_num_batched_tokens=batch * 2,
        max_num_waiting=batch)
    core = idle_core(IdleRunner(_STEP_BLOCK_SIZE), config)
    params = SamplingParams(max_tokens=10_000 if num_steps > 1000 else num_steps * 3, ignore_eos=True)
    for i in range(batch):
        core.add(EngineRequest(str(i), prompt(8 + i % 64, i), params))
    while core.stats().num_waiting_tokens or core.stats().num_running < batch:
        core.step()
    seconds = []
    for _ in range(num_steps):
        started = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def _admission_us(num: int) -> float:
    """Hash, match and allocate, through the call that does the three at once."""
    core = idle_core(IdleRunner(), EngineConfig(num_blocks=4096, max_awaiting_fraction=1.0))
    seconds = []
    for i in range(num):
        request = EngineRequest("r", prompt(512, i), SamplingParams(max_tokens=1))
        started = time.perf_counter()
        core.reserve(request)
        seconds.append(time.perf_counter() - started)
        core.release("r")
    return statistics.median(seconds) * 1e6


def _unused_slots(num_requests: int) -> Figure:
    """KV slots held by running requests that have no token, over all steps of `mixed` lengths (100 to 1024 each)."""
    runner = IdleRunner(counts_slots=True)
    config = EngineConfig(num_blocks=1 << 15, max_num_seqs=256, max_num_batched_tokens=2048, max_num_waiting=1024)
    core = idle_core(runner, config)
    lengths = np.random.default_rng(0).integers(100, 1025, (num_requests, 2)).tolist()
    for i, (num_prompt, num_output) in enumerate(lengths):
        core.add(EngineRequest(str(i), prompt(num_prompt, i), SamplingParams(max_tokens=num_output, ignore_eos=True)))
    _run(core)
    unused = 1 - runner.used_slots / runner.held_slots
    return Figure("KV slots allocated and unused, mixed", 100 * unused, "%", "limit", 100 * _UNUSED_LIMIT,
                  _UNUSED_LIMIT / unused, 1.0)


def _run(core: EngineCore) -> None:
    while core.has_work:
        core.step()
