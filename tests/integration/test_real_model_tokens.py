from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config import EngineConfig
from engine.cpu_runner import TorchRunner
from engine.runner_loading import load_runner
from engine.step import StepPlan
from tests.factories import planned_row

PROMPTS = [
    "The capital of France is",
    "<|im_start|>user\nWrite a haiku about the sea 🌊.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n: int) -> int:\n    ",
    "从前有一座山,山里有座庙,",
]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own generate says, greedy, each prompt alone."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    outs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=NUM_TOKENS,
                             max_new_tokens=NUM_TOKENS)
        outs.append(out[0, len(prompt) :].tolist())
    return outs


@pytest.fixture(scope="module")
def runner(smollm2: Path) -> TorchRunner:
    return load_runner(smollm2, EngineConfig(num_blocks=64, max_model_len=512))


def _generate(runner: TorchRunner, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """All prompts together, each step at most `chunk` tokens of each; blocks interleaved over the pool.

    The ids that end a generation are forbidden, as transformers' `min_new_tokens` does it.
    """
    tables = [list(range(63 - i, 0, -len(prompts))) for i in range(len(prompts))]
    tokens, computed = [list(p) for p in prompts], [0] * len(prompts)
    while any(len(t) < len(p) + NUM_TOKENS for t, p in zip(tokens, prompts, strict=True)):
        rows, owners = [], []
        for i, prompt in enumerate(prompts):
            piece = tokens[i][computed[i] : computed[i] + chunk]
            if len(tokens[i]) < len(prompt) + NUM_TOKENS:
                computed[i] += len(piece)
                rows.append(planned_row(piece, tables[i], start=computed[i] - len(piece),
                                        samples=computed[i] == len(tokens[i])))
                owners.append(i)
        indices, logits = runner.logits(StepPlan(0, rows))
        allowed = logits.index_fill(1, torch.tensor(list(runner.eos_token_ids)), float("-inf"))
        for index, token in zip(indices, allowed.argmax(-1).tolist(), strict=True):
            tokens[owners[index]].append(token)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def test_greedy_tokens_equal_transformers_alone(
    runner: TorchRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert [_generate(runner, [prompt], 512)[0] for prompt in prompts] == expected


def test_greedy_tokens_equal_transformers_batched_and_chunked(
    runner: TorchRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert _generate(runner, prompts, 7) == expected
