"""Where an engine runs by its configuration."""

from __future__ import annotations

import pytest
import torch

from common.errors import ConfigError
from engine.device import CPU, find_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("engine.device.find_spec", lambda name: object())


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert find_device("auto") is find_device("cpu") is CPU


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"device=cuda:1: torch .* sees no GPU") as refusal:
        find_device("cuda:1")
    assert refusal.value.param == "device"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("asked", "name"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_gpu_brings_its_own_defaults(asked: str, name: str) -> None:
    found = find_device(asked)
    assert (found.name, found.is_gpu, found.dtype, found.block_size) == (name, True, "bfloat16", 64)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 8192)


@pytest.mark.usefixtures("two_gpus")
def test_an_index_beyond_the_last_gpu_is_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match="sees 2 GPUs"):
        find_device("cuda:2")


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.device.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        find_device("cuda")
