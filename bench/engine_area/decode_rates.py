"""How fast the engine is on this machine: one request against many, and prompts, with the real model.

It drives the same `EngineCore` as a decode worker, in this process, with no RPC. A rate is the median over
steps in which all requests decode, so that admission and prefill stay out of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from rich.progress import Progress

from bench.engine_area.engines import model_core, prompt
from bench.figures import Figure
from common.sampling_params import SamplingParams
from engine.core import EngineCore
from engine.request import EngineRequest

_PROMPT_TOKENS = 64
_BATCHES = (1, 8, 32)
_MUST_SPEED_UP = 3.0  # 32 requests at once against one


def measure(model_path: Path, *, quick: bool, num_threads: int) -> list[Figure]:
    """Decode rates at several batch sizes and a prompt rate. `quick` takes fewer steps, not other ones."""
    core = model_core(model_path, num_threads=num_threads)
    steps, rounds = (8, 2) if quick else (32, 5)
    rates: dict[int, list[float]] = {batch: [] for batch in _BATCHES}
    prompt_rates: list[float] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("engine", total=rounds * (len(_BATCHES) + 1))
        _decode_rate(core, 1, 2, "warm-up")
        for turn in range(rounds):  # interleaved, so that a slow moment of the machine hits all alike
            for batch in _BATCHES:
                rates[batch].append(_decode_rate(core, batch, steps, f"{turn}-{batch}"))
                progress.advance(task)
            prompt_rates.append(_prompt_rate(core, 512 if quick else 2048, f"{turn}-prompt"))
            progress.advance(task)
    return _figures({batch: statistics.median(r) for batch, r in rates.items()}, statistics.median(prompt_rates))


def _figures(rates: dict[int, float], prompt_rate: float) -> list[Figure]:
    alone = rates[1]
    return [
        Figure("decode, 1 request", alone, "tokens/s"),
        *(Figure(f"decode, {batch} requests", rate, "tokens/s", "1 request", alone, rate / alone,
                 _MUST_SPEED_UP if batch == max(rates) else None)
          for batch, rate in rates.items() if batch > 1),
        Figure("prefill", prompt_rate, "tokens/s", "decode, 1 request", alone, prompt_rate / alone),
    ]


def _decode_rate(core: EngineCore, batch: int, num_steps: int, name: str) -> float:
    """Tokens per second of the steps in which all `batch` requests decode."""
    params = SamplingParams(max_tokens=num_steps + 2, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        core.add(EngineRequest(f"{name}-{i}", prompt(_PROMPT_TOKENS, i), params))
    return batch / statistics.median(_step_seconds(core, batch))


def _step_seconds(core: EngineCore, batch: int) -> Iterator[float]:
    before = 0
    while core.has_work:
        started = time.perf_counter()
        drawn = sum(len(output.new_token_ids) for output in core.step())
        elapsed = time.perf_counter() - started
        if drawn == before == batch:  # the step before ended all prompts
            yield elapsed
        before = drawn


def _prompt_rate(core: EngineCore, num_tokens: int, name: str) -> float:
    """Prompt tokens per second of one request that draws a single token."""
    core.add(EngineRequest(name, prompt(num_tokens, 7), SamplingParams(max_tokens=1, temperature=0.0)))
    started = time.perf_counter()
    while core.has_work:
        core.step()
    return num_tokens / (time.perf_counter() - started)
