"""Each architecture's own fields: older spellings, defaults, refusals. That they compute right, test_decoder tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelLoadError
from engine.model_config import ModelConfig
from engine.models.parts import LinearScaling, Rope
from tests.model_factories import ARCHITECTURES, edit_config, tiny_config


def _config(path: Path, name: str, **change: Any) -> ModelConfig:
    tiny_config(path, ARCHITECTURES[name])
    edit_config(path, **change)
    return ModelConfig.from_folder(path)


def _windows(config: ModelConfig) -> list[int | None]:
    return [layer.attention.window for layer in config.decoder.layers]


@pytest.mark.parametrize(("name", "change", "windows"), [
    ("mistral", {"sliding_window": "absent"}, [4096] * 4),
    ("mistral", {"sliding_window": None}, [None] * 4),
    ("qwen2", {"layer_types": "absent", "sliding_window": 8, "max_window_layers": 0}, [None] * 4),
    ("qwen2", {"layer_types": "absent", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
     [None, None, None, 8]),
    ("gemma3", {"layer_types": "absent", "sliding_window_pattern": 3, "_sliding_window_pattern": "absent"},
     [9, 9, None, 9]),
    ("gemma3", {"layer_types": "absent", "sliding_window_pattern": "absent", "_sliding_window_pattern": 4},
     [9, 9, 9, None]),
    ("cohere2", {"layer_types": "absent"}, [6, 6, 6, None]),
])
def test_windows_follow_the_fields_of_older_and_newer_files(
    tmp_path: Path, name: str, change: dict[str, Any], windows: list[int | None]
) -> None:
    assert _windows(_config(tmp_path, name, **change)) == windows


def test_gemma3_of_an_older_file_has_two_bases_and_scales_the_global_one(tmp_path: Path) -> None:
    config = _config(tmp_path, "gemma3", rope_parameters="absent", rope_theta=5e5, rope_local_base_freq=2e4,
                     rope_scaling={"rope_type": "linear", "factor": 8.0})
    local, whole = (layer.attention.rope for layer in config.decoder.layers[:2])
    assert (local, whole) == (Rope(2e4), Rope(5e5, LinearScaling(8.0)))


def test_published_fields_of_cohere2_that_say_what_is_computed_are_taken(tmp_path: Path) -> None:
    config = _config(tmp_path, "cohere2", use_parallel_block=True, use_qk_norm=False, rotary_pct=1.0,
                     position_embedding_type="rope_gptj")
    assert config.decoder.layers[0].mlp_norm is None


@pytest.mark.parametrize(("name", "field", "value"), [
    ("mistral", "attention_bias", True),
    ("mistral", "llama_4_scaling", {"beta": 0.1}),
    ("qwen2", "layer_types", ["full_attention"]),
    ("qwen2", "layer_types", ["full_attention", "linear_attention"] * 2),
    ("qwen3", "max_window_layers", -1),
    ("qwen3", "num_experts", 64),
    ("gemma3", "attn_logit_softcapping", 50.0),
    ("gemma3", "use_bidirectional_attention", True),
    ("gemma3", "hidden_activation", "relu"),
    ("gemma3", "sliding_window", None),
    ("gemma3", "final_logit_softcapping", -1.0),
    ("cohere2", "use_qk_norm", True),
    ("cohere2", "use_parallel_block", False),
    ("cohere2", "logit_scale", 0),
])
def test_what_an_architecture_does_not_compute_is_refused_by_name(
    tmp_path: Path, name: str, field: str, value: Any
) -> None:
    change = {"use_sliding_window": True, "sliding_window": 4} if field == "max_window_layers" else {}
    with pytest.raises(ModelLoadError, match=f"model config: {field}: ") as refusal:
        _config(tmp_path, name, **change, **{field: value})
    assert refusal.value.param == field
    assert "\n" not in refusal.value.message
