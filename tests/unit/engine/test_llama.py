from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.cpu_runner import TorchRunner
from engine.runner_loading import load_runner
from engine.step import PlannedRow, StepPlan
from tests.factories import planned_row, tiny_llama

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=128)
PROMPT = [(7 * i * i + 3 * i + 11) % 256 for i in range(45)]
THREE_TO_ONE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6}
SHAPES: dict[str, dict[str, Any]] = {
    "tied, three to one": THREE_TO_ONE,
    "untied, three to one": THREE_TO_ONE | {"tie_word_embeddings": False},
    "tied, one to one": {"num_key_value_heads": 4},
    "untied, one kv head, wide heads": {"tie_word_embeddings": False, "num_key_value_heads": 1, "head_dim": 32},
    "another rope base": {"rope_theta": 500000.0, "rms_norm_eps": 1e-3},
}
SCATTERED = [50, 3, 17, 63, 8, 41, 0, 29, 12, 33, 5, 60]  # 12 blocks of 4 hold the prompt


def _logits(runner: TorchRunner, *rows: PlannedRow) -> torch.Tensor:
    """In the plan's order, [rows that sample, vocab]."""
    indices, logits = runner.logits(StepPlan(1, rows))
    return logits[torch.tensor(indices).argsort()]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_at_every_position_equal_transformers(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = tiny_llama(tmp_path, 5, **shape)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = model(torch.tensor([PROMPT])).logits[0]
    runner = load_runner(folder, CONFIG)
    first = _logits(runner, planned_row(PROMPT[:1], SCATTERED))
    rest = [_logits(runner, planned_row([t], SCATTERED, start=i)) for i, t in enumerate(PROMPT[1:], start=1)]
    assert _error(torch.cat([first, *rest]), want) < 1e-5
    assert _error(_logits(runner, planned_row(PROMPT, SCATTERED)), want[-1:]) < 1e-5


@pytest.fixture
def runner(tmp_path: Path) -> TorchRunner:
    return load_runner(tiny_llama(tmp_path, 1, **THREE_TO_ONE), CONFIG)


@pytest.mark.parametrize("chunks", [[44, 1], [1, 44], [7, 9, 29], [16, 16, 13]])
def test_a_chunked_prompt_equals_the_whole_prompt(runner: TorchRunner, chunks: list[int]) -> None:
    whole = _logits(runner, planned_row(PROMPT, range(12)))
    start = 0
    for size in chunks:
        chunked = _logits(runner, planned_row(PROMPT[start : start + size], SCATTERED, start=start))
        start += size
    assert start == len(PROMPT)
    assert _error(chunked, whole) < 1e-5


def test_a_row_among_others_equals_the_row_alone(runner: TorchRunner) -> None:
    others = [list(range(b, b + 3)) for b in (18, 21, 24)]
    alone = _logits(runner, planned_row(PROMPT[:44], SCATTERED))
    alone_next = _logits(runner, planned_row(PROMPT[44:], SCATTERED, start=44))
    runner.cache.blocks.zero_()
    together = _logits(
        runner, planned_row([5], others[0]), planned_row(PROMPT[:44], SCATTERED), planned_row([1] * 9, others[1]),
        planned_row([8, 9], others[2], samples=False))
    together_next = _logits(
        runner, planned_row([6], others[0], start=1), planned_row(PROMPT[44:], SCATTERED, start=44),
        planned_row([2], others[1], start=9), planned_row([3, 4, 5], others[2], start=2))
    assert len(together) == 3
    assert _error(together[1:2], alone) < 1e-5
    assert _error(together_next[1:2], alone_next) < 1e-5


def test_rows_that_share_prefix_blocks_equal_rows_that_own_theirs(runner: TorchRunner) -> None:
    _logits(runner, planned_row(PROMPT[:16], [9, 40, 22, 31]))
    tails = [PROMPT[16:30], PROMPT[20:45]]
    tables = [[9, 40, 22, 31, 1, 2, 3, 4], [9, 40, 22, 31, 10, 11, 12, 13, 14, 15, 16]]
    shared = _logits(runner, *(planned_row(t, b, start=16) for t, b in zip(tails, tables, strict=True)))
    prefix_before = runner.cache.blocks[[9, 40, 22, 31]].clone()
    own = torch.cat([_logits(runner, planned_row(PROMPT[:16] + tail, range(42, 60))) for tail in tails])
    assert _error(shared, own) < 1e-5
    assert torch.equal(prefix_before, runner.cache.blocks[[9, 40, 22, 31]])


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, 2)
    row = planned_row(PROMPT, SCATTERED)
    exact, rough = (_logits(load_runner(folder, CONFIG, dtype=d), row) for d in ("float32", "bfloat16"))
    assert rough.dtype == torch.float32
    assert 0 < _error(rough, exact) < 0.1
