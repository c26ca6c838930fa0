"""The same tokens from transformers, in the same process, turn by turn."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.engine_area.engines import model_core, prompt
from bench.figures import Figure
from common.sampling_params import SamplingParams
from engine.core import EngineCore
from engine.request import EngineRequest

_BATCH_MUST = 1.5  # against continuous batching
_SEQUENTIAL_MUST = 3.0  # against one after another, where that does not run


def measure(model_path: Path, *, quick: bool, num_threads: int) -> list[Figure]:
    """Tokens per second, of one request and of 16 with mixed lengths, against `generate` and `generate_batch`."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_threads)
    peer = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    core = model_core(model_path, num_threads=num_threads)
    rounds, num_tokens = (2, 16) if quick else (4, 48)
    ours: list[float] = []
    theirs: list[float] = []
    for turn in range(rounds):
        asked = [(prompt(32, turn), num_tokens)]
        ours.append(_engine_rate(core, asked, f"one-{turn}"))
        theirs.append(_generate_rate(peer, asked))
    alone, peer_alone = statistics.median(ours), statistics.median(theirs)
    ratio = alone / peer_alone
    return [Figure("decode, 1 request", alone, "tokens/s", "transformers generate", peer_alone, ratio, 1.0),
            _many(core, peer, quick=quick)]


def _many(core: EngineCore, peer: Any, *, quick: bool) -> Figure:
    scale = 2 if quick else 1
    asked = [(prompt(16 + 13 * i % 96, 100 + i), (12 + 7 * i % 40) // scale) for i in range(16)]
    rates = [_engine_rate(core, asked, f"many-{turn}") for turn in range(1 if quick else 2)]
    batched = _generate_batch_rate(peer, asked)
    name, rate, must = ("transformers generate_batch", batched, _BATCH_MUST) if batched else (
        "transformers generate, one by one", _generate_rate(peer, asked), _SEQUENTIAL_MUST)
    ours = statistics.median(rates)
    return Figure("16 requests, mixed lengths", ours, "tokens/s", name, rate, ours / rate, must)


def _engine_rate(core: EngineCore, asked: list[tuple[list[int], int]], name: str) -> float:
    for i, (ids, num_tokens) in enumerate(asked):
        core.add(EngineRequest(
            f"{name}-{i}", ids, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)))
    started = time.perf_counter()
    while core.has_work:
        core.step()
    return sum(num_tokens for _, num_tokens in asked) / (time.perf_counter() - started)


@torch.inference_mode()
def _generate_rate(peer: Any, asked: list[tuple[list[int], int]]) -> float:
    started = time.perf_counter()
    for ids, num_tokens in asked:
        out = peer.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.int64), do_sample=False,
            min_new_tokens=num_tokens, max_new_tokens=num_tokens, pad_token_id=0)
        assert out.shape[1] == len(ids) + num_tokens
    return sum(num_tokens for _, num_tokens in asked) / (time.perf_counter() - started)


def _generate_batch_rate(peer: Any, asked: list[tuple[list[int], int]]) -> float | None:
    """None where transformers' continuous batching does not run on this machine."""
    from transformers import GenerationConfig

    longest = max(num_tokens for _, num_tokens in asked)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    started = time.perf_counter()
    try:
        outputs = peer.generate_batch([ids for ids, _ in asked], generation_config=config)
    except Exception:  # it asks for a GPU in many ways
        return None
    seconds = time.perf_counter() - started
    drawn = sum(len(output.generated_tokens) for output in outputs.values())
    return drawn / seconds if drawn >= len(asked) * longest // 2 else None
