"""Tiny random models of every architecture, made and saved by transformers itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}


class TinyModel(NamedTuple):
    config: str  # class names in transformers
    model: str
    fields: Mapping[str, Any] = {}


_LLAMA = TinyModel("LlamaConfig", "LlamaForCausalLM", {"head_dim": 16})
_QWEN2 = TinyModel("Qwen2Config", "Qwen2ForCausalLM")
_QWEN3 = TinyModel("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32})
_GEMMA3 = TinyModel("Gemma3TextConfig", "Gemma3ForCausalLM", {
    "head_dim": 32, "sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24})
_COHERE2 = TinyModel("Cohere2Config", "Cohere2ForCausalLM", {"sliding_window": 6})


def _with(base: TinyModel, **fields: Any) -> TinyModel:
    return base._replace(fields={**base.fields, **fields})


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


# One of each architecture.
ARCHITECTURES: dict[str, TinyModel] = {
    "llama": _LLAMA,
    "mistral": TinyModel("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "gemma3": _GEMMA3,
    "cohere2": _COHERE2,
}

# What their fields can change.
VARIANTS: dict[str, TinyModel] = {
    "llama with all biases, gelu": _with(_LLAMA, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "llama, tied, one kv head": _with(_LLAMA, tie_word_embeddings=True, num_key_value_heads=1),
    "rope linear": _with(_LLAMA, rope_parameters=_rope("linear", factor=4.0)),
    "rope llama3": _with(_LLAMA, rope_parameters=_rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)),
    "rope yarn": _with(_LLAMA, rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "rope yarn, all fields": _with(_LLAMA, rope_parameters=_rope(
        "yarn", factor=4.0, original_max_position_embeddings=200, beta_fast=16.0, beta_slow=2.0, mscale=1.2,
        mscale_all_dim=0.7, truncate=False)),
    "rope yarn, attention factor": _with(_LLAMA, rope_parameters=_rope(
        "yarn", factor=2.0, original_max_position_embeddings=64, attention_factor=1.3)),
    "mistral without a window": TinyModel("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2 with windows": _with(_QWEN2, use_sliding_window=True, sliding_window=8, max_window_layers=2),
    "qwen3 with biases, layer types": _with(
        _QWEN3, attention_bias=True, use_sliding_window=True, sliding_window=5,
        layer_types=["full_attention", "sliding_attention"] * 2),
    "gemma3, soft cap, scaled global rope": _with(
        _GEMMA3, final_logit_softcapping=5.0, rope_parameters={
            "full_attention": _rope("linear", factor=8.0), "sliding_attention": _rope("default")}),
    "gemma3 with biases, untied": _with(_GEMMA3, attention_bias=True, tie_word_embeddings=False),
    "cohere2 with biases, wide window": _with(_COHERE2, attention_bias=True, sliding_window=100, logit_scale=0.5),
}


def tiny_model(path: Path, tiny: TinyModel, seed: int = 0, **save: Any) -> Any:
    """Save the model's folder into `path` and return transformers' own model, float32."""
    return save_random(path, getattr(transformers, tiny.model)(_config(tiny)), seed, **save)


def tiny_config(path: Path, tiny: TinyModel) -> None:
    """Only the model's config.json."""
    config = _config(tiny)
    config.architectures = [tiny.model]
    config.save_pretrained(path)


def _config(tiny: TinyModel) -> Any:
    return getattr(transformers, tiny.config)(**{**_SIZES, **tiny.fields})


def save_random(path: Path, model: Any, seed: int = 0, **save: Any) -> Any:
    """Fill all weights so that activations stay near 1 and no norm or bias is plain, then save."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight += 0.2 * drawn
            else:
                weight.copy_(drawn * (2.0 if "embed" in name else 1.5 * weight.shape[-1] ** -0.5))
    model.eval().save_pretrained(path, **save)
    return model


def edit_config(path: Path, **change: Any) -> None:
    """Set fields of a folder's config.json; "absent" takes one out."""
    file = path / "config.json"
    raw = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in raw.items() if value != "absent"}))
