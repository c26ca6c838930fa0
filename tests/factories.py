"""Small real things for tests: model folders, step plans."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from common.sampling_params import SamplingParams
from engine.step import PlannedRow, Runner, StepPlan, StepResult

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tiny_llama(path: Path, seed: int = 0, *, tokenizer_from: Path | None = None, **shape: Any) -> Path:
    """Write a random Llama folder into `path` and return it; `shape` overrides fields of its config.json.

    With `tokenizer_from` (a model folder) its tokenizer files come along and the vocabulary is 49152.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float32",
        "vocab_size": 49152 if tokenizer_from else 256, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2,
    } | shape
    (path / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, seed), path / "model.safetensors", metadata={"format": "pt"})
    for name in TOKENIZER_FILES if tokenizer_from else ():
        shutil.copyfile(tokenizer_from / name, path / name)  # type: ignore[operator]
    return path


def tiny_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors of the shapes that `config` asks for, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    hidden, intermediate, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def matrix(size_out: int, size_in: int) -> np.ndarray:
        values = rng.standard_normal((size_out, size_in), dtype=np.float32)
        values /= np.float32(size_in**0.5)
        return values

    def norm() -> np.ndarray:
        return np.asarray(1 + 0.1 * rng.standard_normal(hidden), dtype=np.float32)

    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 2, "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(q_size, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, q_size),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, intermediate),
        }
    return tensors


def computed(runner: Runner, plan: StepPlan) -> StepResult:
    """One plan by itself."""
    runner.launch(plan)
    return runner.collect()


def planned_row(
    token_ids: Sequence[int], block_ids: Sequence[int], *, start: int = 0, samples: bool = True,
    output_position: int = 0, params: SamplingParams = GREEDY, request_id: str = "r",
) -> PlannedRow:
    """A row of a step plan, greedy and sampling unless told otherwise."""
    return PlannedRow(request_id, token_ids, start, block_ids, samples, output_position, params)
