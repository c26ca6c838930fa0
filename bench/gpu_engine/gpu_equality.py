"""A real model's weights on the GPU against the CPU engine, whose float32 tokens are those of transformers.

In float32 the greedy tokens are the same. In bfloat16 the model is led along the float32 engine's answers, and at each
position the likeliest token is compared; where it differs, the two were close in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from bench.figures import Figure
from bench.gpu_engine.measure import Say
from common.block_hash import HashScheme
from common.errors import ConfigError
from common.generation import TokenLogprobs
from common.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import find_device
from engine.gpu.loading import GpuSizes, load_gpu_runner
from engine.model_config import ModelConfig
from engine.request import EngineRequest
from engine.runner_loading import load_runner
from engine.step import Runner

_PROMPTS: Final = (
    "The capital of France is", "Once upon a time, in a small village by the sea, there lived",
    "To make bread you need flour, water, salt and yeast. First,",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "The three laws of motion, as Newton wrote them, say that",
    "Dear Sir or Madam,\n\nI am writing to you because", "In 1969 two people walked on the moon. They",
    "Water boils at a lower temperature on a mountain because", "1, 2, 4, 8, 16, 32,",
    "The difference between weather and climate is that", "My favourite recipe for a winter soup begins with",
    "A good test of software should")
_NUM_TOKENS, _TOP = 96, 20
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_LEN, _NUM_SEQS, _BUDGET = 64, 128, 1024, 16, 2048
_AGREEMENT, _MARGIN = 0.97, 0.25


def measure(folder: Path, device: str, num_threads: int, say: Say) -> list[Figure]:
    """Raises `ConfigError` where there is no GPU."""
    found = find_device(device)
    if not found.is_gpu:
        raise ConfigError(f"device={device}: there is no GPU to compare", param="device")
    return list(_figures(folder, found.name, num_threads, say))


def _figures(folder: Path, device: str, num_threads: int, say: Say) -> Iterator[Figure]:
    config = _config()
    cpu = _core(load_runner(folder, config, num_threads=num_threads), "float32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in _PROMPTS]
    wanted = _answers(cpu, prompts)
    for dtype in ("float32", "bfloat16"):
        runner = load_gpu_runner(
            ModelConfig.from_folder(folder), folder,
            GpuSizes(_BLOCK_SIZE, _MAX_LEN, _NUM_SEQS, _BUDGET, num_blocks=_NUM_BLOCKS), device, dtype, say=say,
            warn=say)
        gpu = _core(runner, dtype)
        if dtype == "float32":
            same = sum(ours == theirs for ours, theirs in zip(_answers(gpu, prompts), wanted, strict=True))
            yield Figure("float32: answers with the CPU's tokens", same, "answers", "answers", len(wanted),
                         same / len(wanted), 1.0)
            continue
        whole = [prompt + answer for prompt, answer in zip(prompts, wanted, strict=True)]
        yield from _agreement(_scores(cpu, whole), _scores(gpu, whole))


def _agreement(
    right: Sequence[Sequence[TokenLogprobs]], ours: Sequence[Sequence[TokenLogprobs]]
) -> Iterator[Figure]:
    """Of the likeliest tokens; and by how much the float32 model preferred its own where they differ."""
    pairs = [pair for row, other in zip(right, ours, strict=True) for pair in zip(row, other, strict=True)]
    margins = [_margin(exact, rough.top_token_ids[0]) for exact, rough in pairs]
    differing = [margin for margin in margins if margin > 0]
    share = 1 - len(differing) / len(pairs)
    worst = max(differing, default=0.0)
    yield Figure("bfloat16: positions with float32's likeliest token", share, "of positions", "limit", _AGREEMENT,
                 share / _AGREEMENT, 1.0)
    yield Figure("bfloat16: widest margin where it differs", worst, "of a logit", "limit", _MARGIN,
                 _MARGIN / max(worst, 1e-9), 1.0)


def _margin(exact: TokenLogprobs, token_id: int) -> float:
    """How much likelier the best token is than `token_id`; 0 for the best itself, infinite beyond the alternatives."""
    if exact.top_token_ids[0] == token_id:
        return 0.0
    found = dict(zip(exact.top_token_ids, exact.top_logprobs, strict=True))
    return max(exact.top_logprobs[0] - found.get(token_id, float("-inf")), 1e-9)


def _answers(core: EngineCore, prompts: Sequence[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(str(i), prompt, params))
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.new_token_ids
    return list(found.values())


def _scores(core: EngineCore, rows: Sequence[list[int]]) -> list[list[TokenLogprobs]]:
    """At each position but the first."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=_TOP)
    found: dict[str, list[TokenLogprobs]] = {str(i): [] for i in range(len(rows))}
    for i, row in enumerate(rows):
        core.add(EngineRequest(str(i), row, params))
    while core.has_work:
        for output in core.step():
            found[output.request_id] += [score for score in output.prompt_logprobs if score is not None]
    return list(found.values())


def _config() -> EngineConfig:
    return EngineConfig(block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS, max_model_len=_MAX_LEN,
                        max_num_seqs=_NUM_SEQS, max_num_batched_tokens=_BUDGET)


def _core(runner: Runner, dtype: str) -> EngineCore:
    return EngineCore(_config(), runner, HashScheme(b"bench".ljust(32), "model", "", dtype, _BLOCK_SIZE))
