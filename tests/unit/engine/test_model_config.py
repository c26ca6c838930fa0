from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ModelLoadError
from engine.model_config import ModelConfig
from tests.factories import tiny_llama


def _config(path: Path, **change: Any) -> ModelConfig:
    folder = tiny_llama(path)
    raw = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "absent"}))
    return ModelConfig.from_folder(folder)


def test_a_plain_llama_config_is_read_whole(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("LlamaForCausalLM", 256, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.eos_token_ids == {2}
    assert config.max_position_embeddings == 512


def test_head_dim_and_kv_heads_follow_from_the_rest_when_absent(tmp_path: Path) -> None:
    config = _config(tmp_path, head_dim="absent", num_key_value_heads="absent")
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_the_generation_config_says_what_ends_a_generation(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == {2, 7}


@pytest.mark.parametrize(("name", "value"), [
    ("architectures", ["MixtralForCausalLM"]),
    ("architectures", None),
    ("architectures", []),
    ("hidden_act", "relu"),
    ("attention_bias", "yes"),
    ("sliding_window", 4096),
    ("quantization_config", {"quant_method": "gptq"}),
    ("attn_logit_softcapping", 50.0),
    ("num_experts", 8),
    ("rope_interleaved", True),
    ("pretraining_tp", 2),
    ("rope_scaling", "yarn"),
    ("partial_rotary_factor", 0.5),
    ("vocab_size", 0),
    ("hidden_size", "absent"),
    ("num_hidden_layers", "two"),
    ("num_attention_heads", 5),
    ("head_dim", 15),
    ("rope_theta", -1.0),
    ("rms_norm_eps", "small"),
    ("tie_word_embeddings", "yes"),
    ("eos_token_id", "</s>"),
])
def test_what_the_forward_pass_does_not_compute_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=name) as refusal:
        _config(tmp_path, **{name: value})
    assert refusal.value.param == name
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_config_that_is_not_a_json_object_is_one_clear_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json") as refusal:
        ModelConfig.from_folder(tmp_path)
    assert "\n" not in refusal.value.message


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        ModelConfig.from_folder(tmp_path / "nowhere")
