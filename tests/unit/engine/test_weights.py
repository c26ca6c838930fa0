from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from common.errors import ModelLoadError
from engine.config import EngineConfig
from engine.runner_loading import load_runner
from engine.weights import WeightFolder
from tests.factories import tiny_llama

CONFIG = EngineConfig(num_blocks=4, max_model_len=64)


def _rewrite(folder: Path, **change: np.ndarray | None) -> None:
    """Replace tensors by name (dots written as `__`), or drop them (None)."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in change.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    _rewrite(tmp_path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_runner(tmp_path, CONFIG)


def test_an_untied_model_without_its_head_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path, tie_word_embeddings=False)
    _rewrite(tmp_path, lm_head__weight=None)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is missing"):
        load_runner(tmp_path, CONFIG)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    _rewrite(tmp_path, model__norm__weight=np.ones(63, np.float32))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[63\].*\[64\]"):
        load_runner(tmp_path, CONFIG)


def test_a_tensor_of_another_dtype_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    _rewrite(tmp_path, model__norm__weight=np.ones(64, np.int8))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has dtype torch\.int8"):
        load_runner(tmp_path, CONFIG)


def test_a_tensor_of_another_architecture_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    _rewrite(tmp_path, model__layers__0__self_attn__q_norm__weight=np.ones(16, np.float32))
    with pytest.raises(ModelLoadError, match=r"q_norm\.weight is not part"):
        load_runner(tmp_path, CONFIG)


def test_a_torn_file_is_one_clear_line(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be opened") as refusal:
        load_runner(tmp_path, CONFIG)
    assert "\n" not in refusal.value.message


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has neither"):
        load_runner(tmp_path, CONFIG)


def _shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_hold_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    whole, sharded = tiny_llama(tmp_path / "whole", 3), tiny_llama(tmp_path / "sharded", 3)
    _shard(sharded)
    name, shape = "model.layers.1.mlp.down_proj.weight", (64, 96)
    with WeightFolder(whole) as one, WeightFolder(sharded) as many:
        assert torch.equal(one.take(name, shape), many.take(name, shape))
    load_runner(sharded, CONFIG)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    _shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00002-of-00002"):
        load_runner(tmp_path, CONFIG)


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": {"a": "../outside.safetensors"}}'])
def test_a_broken_shard_index_is_refused(tmp_path: Path, index: str) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        load_runner(tmp_path, CONFIG)


def test_progress_counts_bytes_up_to_the_files(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    heard: list[tuple[int, int]] = []
    load_runner(tmp_path, CONFIG, progress=lambda done, total: heard.append((done, total)))
    done = [d for d, _ in heard]
    assert done == sorted(done)
    total = heard[-1][1]
    assert total == (tmp_path / "model.safetensors").stat().st_size
    assert total * 0.95 < done[-1] <= total
