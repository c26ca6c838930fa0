"""The order of a load and what it asks of the memory; the GPU's memory is a number here, and steps are not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, ModelLoadError
from engine.gpu import loading
from engine.gpu.gpu_runner import GpuRunner
from engine.gpu.loading import GpuSizes, load_gpu_runner
from engine.gpu.step_graphs import StepGraphs
from engine.model_config import ModelConfig
from engine.models.decoder_weights import load_decoder
from engine.weights import WeightFolder
from tests.factories import tiny_llama
from tests.kernel_mode import DEVICE

MIB = 1 << 20
SIZES = GpuSizes(block_size=16, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64)
BLOCK = 2 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, slots, head_dim, float32


class Gpu:
    """Its memory; `used` grows by what a load does."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.events: list[str] = []

    def load(self, folder: Path, sizes: GpuSizes = SIZES, **fields: Any) -> GpuRunner:
        model = ModelConfig.from_folder(folder)
        return load_gpu_runner(model, folder, sizes, str(DEVICE), "float32", say=self.say, warn=self.say, **fields)

    def say(self, event: str, **_: object) -> None:
        self.events.append(event)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path, head_dim=16)


@pytest.fixture
def gpu(runtime: None, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    held = Gpu(800 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (held.free, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def takes(num_bytes: int) -> Any:
        def act(*_: object, **__: object) -> None:
            held.free -= num_bytes

        return act

    monkeypatch.setattr(loading, "run", takes(30 * MIB))
    monkeypatch.setattr(loading, "warm_up", takes(0))
    monkeypatch.setattr(StepGraphs, "capture", takes(15 * MIB))
    return held


def test_the_pool_is_what_the_probe_leaves_of_the_share(gpu: Gpu, folder: Path) -> None:
    runner = gpu.load(folder, replace(SIZES, gpu_memory_utilization=0.5))
    num_graphs = StepGraphs(SIZES.max_num_seqs, SIZES.max_num_batched_tokens).num_wanted
    activations = 30 * MIB - 8 * BLOCK  # the probe's own pool is not among them
    assert runner.num_blocks == (500 * MIB - activations - 15 * MIB - 5 * MIB * (num_graphs - 1)) // BLOCK
    assert runner.block_bytes == BLOCK
    assert gpu.events == ["weights_on_device", "gpu_memory", "graphs_captured", "gpu_ready"]


def test_a_number_of_blocks_that_is_given_needs_no_probe(gpu: Gpu, folder: Path) -> None:
    assert gpu.load(folder, replace(SIZES, num_blocks=12)).num_blocks == 12
    assert "gpu_memory" not in gpu.events


def test_weights_beyond_the_free_memory_are_refused_unread(gpu: Gpu, folder: Path) -> None:
    gpu.free = 1000
    heard: list[int] = []
    with pytest.raises(ConfigError, match="weights take"):
        gpu.load(folder, progress=lambda done, total: heard.append(done))
    assert not heard


def test_too_little_for_one_sequence_is_refused(gpu: Gpu, folder: Path) -> None:
    gpu.free = 60 * MIB
    with pytest.raises(ConfigError, match="too little memory for the KV cache"):
        gpu.load(folder)


@pytest.mark.parametrize(("part", "change"), [
    ("heads of 24 dimensions", {"head_dim": 24}), ("activation gelu", {"hidden_act": "gelu"})])
def test_a_model_with_a_part_that_has_no_kernel_is_refused_before_it_is_read(
    gpu: Gpu, tmp_path: Path, part: str, change: dict[str, Any]
) -> None:
    with pytest.raises(ModelLoadError, match=f"{part} cannot run on a GPU yet; use device=cpu"):
        gpu.load(tiny_llama(tmp_path / "other", **change))
    assert not gpu.events


@pytest.mark.parametrize("block_size", [8, 24])
def test_a_block_size_that_kernels_do_not_take_is_refused(gpu: Gpu, folder: Path, block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size must be a power of two of at least 16 .* got {block_size}"):
        gpu.load(folder, replace(SIZES, block_size=block_size))


def test_weights_go_to_a_device_input_by_input_and_progress_counts_bytes(folder: Path) -> None:
    heard: list[tuple[int, int]] = []
    with WeightFolder(folder, lambda done, total: heard.append((done, total))) as stored:
        loaded = load_decoder(
            ModelConfig.from_folder(folder).decoder, stored, torch.bfloat16, torch.device("meta"))
    for matrix in (loaded.head, loaded.layers[0].qkv, loaded.layers[1].down):
        assert (matrix.device.type, matrix.dtype) == ("meta", torch.bfloat16)
        assert matrix.is_contiguous()
    assert heard[-1][0] <= heard[-1][1]
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
