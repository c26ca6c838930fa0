"""Every architecture against transformers' own forward pass, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.cpu_runner import TorchRunner
from engine.runner_loading import load_runner
from engine.step import PlannedRow, StepPlan
from tests.factories import planned_row
from tests.model_factories import ARCHITECTURES, VARIANTS, TinyModel, save_random, tiny_model

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=128)
PROMPT = [(7 * i * i + 3 * i + 11) % 256 for i in range(45)]  # longer than every window
SCATTERED = [50, 3, 17, 63, 8, 41, 0, 29, 12, 33, 5, 60, 21, 35, 44, 1, 9, 38, 27, 14, 52, 6]  # blocks of 4
NUM_GREEDY = 40
LIMIT = 1e-5  # relative; tight enough to tell the two kinds of GELU apart
EVERY = ARCHITECTURES | VARIANTS


def _logits(runner: TorchRunner, *rows: PlannedRow) -> torch.Tensor:
    """In the plan's order, [rows that sample, vocab]."""
    indices, logits = runner.logits(StepPlan(1, rows))
    return logits[torch.tensor(indices).argsort()]


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def _wanted(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("tiny", EVERY.values(), ids=EVERY.keys())
def test_logits_equal_transformers_token_by_token_whole_and_in_chunks(tmp_path: Path, tiny: TinyModel) -> None:
    model = tiny_model(tmp_path, tiny)
    want = _wanted(model, PROMPT)
    runner = load_runner(tmp_path, CONFIG)
    each = [_logits(runner, planned_row([t], SCATTERED, start=i)) for i, t in enumerate(PROMPT)]
    assert _error(torch.cat(each), want) < LIMIT
    runner.cache.blocks.zero_()
    assert _error(_logits(runner, planned_row(PROMPT, SCATTERED)), want[-1:]) < LIMIT
    for chunks in ([44, 1], [3, 5, 18, 19], [16, 16, 13]):
        runner.cache.blocks.zero_()
        start = 0
        for size in chunks:
            last = _logits(runner, planned_row(PROMPT[start : start + size], SCATTERED, start=start))
            start += size
            assert _error(last, want[start - 1 : start]) < LIMIT


@pytest.mark.parametrize("tiny", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_greedy_tokens_of_a_ragged_batch_equal_each_prompt_alone_in_transformers(
    tmp_path: Path, tiny: TinyModel
) -> None:
    model = tiny_model(tmp_path, tiny, seed=3)
    runner = load_runner(tmp_path, CONFIG)
    prompts = [PROMPT, PROMPT[5:9], PROMPT[20:43]]
    tables = [[i + 3 * j for j in range(21)] for i in range(3)]
    tokens, computed = [list(p) for p in prompts], [0, 0, 0]
    for _ in range(NUM_GREEDY):
        rows = [planned_row(t[c:], b, start=c) for t, c, b in zip(tokens, computed, tables, strict=True)]
        drawn = _logits(runner, *rows).argmax(-1).tolist()
        computed = [len(t) for t in tokens]
        for row, token in zip(tokens, drawn, strict=True):
            row.append(token)
    for prompt, got in zip(prompts, tokens, strict=True):
        want = _wanted(model, got[:-1]).argmax(-1).tolist()
        assert got[len(prompt) :] == want[len(prompt) - 1 :]


@pytest.mark.parametrize("tiny", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def test_bfloat16_is_close_to_float32_from_files_of_either(tmp_path: Path, tiny: TinyModel) -> None:
    model = tiny_model(tmp_path / "float32", tiny)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    row = planned_row(PROMPT, SCATTERED)
    exact = _logits(load_runner(tmp_path / "float32", CONFIG), row)
    for stored in ("float32", "bfloat16"):
        rough = _logits(load_runner(tmp_path / stored, CONFIG, dtype="bfloat16"), row)
        assert 0 < _error(rough, exact) < 0.1
    assert _error(_logits(load_runner(tmp_path / "bfloat16", CONFIG), row), exact) < 0.1


def test_sharded_files_of_transformers_give_the_same_logits(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, ARCHITECTURES["qwen3"], max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    got = _logits(load_runner(tmp_path, CONFIG), planned_row(PROMPT, SCATTERED))
    assert _error(got, _wanted(model, PROMPT)[-1:]) < LIMIT


def test_the_text_half_of_a_gemma3_with_images_equals_transformers(tmp_path: Path) -> None:
    text = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9, "sliding_window_pattern": 2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = save_random(tmp_path, transformers.Gemma3ForConditionalGeneration(config))
    got = _logits(load_runner(tmp_path, CONFIG), planned_row(PROMPT, SCATTERED))
    assert _error(got, _wanted(model, PROMPT)[-1:]) < LIMIT
