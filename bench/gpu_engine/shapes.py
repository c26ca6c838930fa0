"""Shapes of public models: what their config files say, without weights."""

from __future__ import annotations

from typing import Any, Final

from engine.model_config import ModelConfig
from engine.models import ARCHITECTURES
from engine.models.config_fields import ConfigFields

_ARCHITECTURE: Final = "Qwen3ForCausalLM"
_QWEN3: Final[dict[str, Any]] = {
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 40960, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "vocab_size": 151_936}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
        "tie_word_embeddings": False},
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
        "tie_word_embeddings": True},
}


def shape(name: str, num_layers: int | None = None) -> ModelConfig:
    """`num_layers`: of a copy that is cut down to so many."""
    raw = dict(SHAPES[name])
    if num_layers is not None:
        raw["num_hidden_layers"] = num_layers
    return ModelConfig(_ARCHITECTURE, ARCHITECTURES[_ARCHITECTURE](ConfigFields(raw)), frozenset({0}))
