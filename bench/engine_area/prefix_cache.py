"""What the prefix cache gives when prompts share a prefix, and what it costs when none do."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from bench.engine_area.engines import model_core, prompt
from bench.figures import Figure
from common.sampling_params import SamplingParams
from engine.core import EngineCore
from engine.request import EngineRequest

_SHARED_MUST = 4.0
_COST_LIMIT = 1.02
_PAIRS = 10


def measure(model_path: Path, *, quick: bool, num_threads: int) -> list[Figure]:
    """16 prompts with 1024 (quick: 256) tokens in common; and CPU time at 0 % hits, cache on against off."""
    prefix, num_requests = prompt(256 if quick else 1024, 1), 8 if quick else 16
    prompts = [prefix + prompt(16, 50 + i) for i in range(num_requests)]
    cores = {caches: model_core(model_path, num_threads=num_threads, caches=caches) for caches in (True, False)}
    seconds = {caches: _seconds(core, prompts, max_tokens=2) for caches, core in cores.items()}
    pairs = [_cpu_ratio(cores, turn) for turn in range(3 if quick else _PAIRS)]
    cost = statistics.median(pairs)
    return [Figure(f"shared prefix of {len(prefix)}, {num_requests} requests", seconds[True], "s", "cache off",
                   seconds[False], seconds[False] / seconds[True], None if quick else _SHARED_MUST),
            Figure("CPU time with the cache on, no hits", cost, "x", "cache off", 1.0, 1 / cost,
                   None if quick else 1 / _COST_LIMIT)]


def _cpu_ratio(cores: dict[bool, EngineCore], turn: int) -> float:
    """Prompts that nobody has seen before, to both; which is first alternates."""
    seconds = {}
    for caches in (True, False) if turn % 2 else (False, True):
        prompts = [prompt(64, 1000 + turn * 4 + i) for i in range(4)]
        started = time.process_time()
        _seconds(cores[caches], prompts, max_tokens=16)
        seconds[caches] = time.process_time() - started
    return seconds[True] / seconds[False]


def _seconds(core: EngineCore, prompts: list[list[int]], *, max_tokens: int) -> float:
    """The first prompt is done before the others come."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    for group in (prompts[:1], prompts[1:]):
        for ids in group:
            core.add(EngineRequest(str(id(ids)), ids, params))
        while core.has_work:
            core.step()
    return time.perf_counter() - started
