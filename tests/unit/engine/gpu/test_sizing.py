"""How many KV blocks fit on a GPU."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from engine.gpu.sizing import GpuMemory, check_weights, kv_blocks

GIB = 1 << 30
H200 = GpuMemory(total=140 * GIB, free=139 * GIB, weights=16 * GIB, activations=2 * GIB, graphs=GIB)
BLOCK = 9 << 20


def blocks(memory: GpuMemory, utilization: float = 0.9, longest: int = 640) -> int:
    return kv_blocks(memory, utilization, BLOCK, longest, 40_960)


def test_the_cache_gets_what_the_share_of_the_memory_leaves() -> None:
    assert blocks(H200) == int((126 - 16 - 2 - 1) * GIB // BLOCK)


def test_memory_that_others_hold_is_not_given_out_again() -> None:
    crowded = GpuMemory(H200.total, 60 * GIB, H200.weights, H200.activations, H200.graphs)
    assert blocks(crowded) == int((60 - 19) * GIB // BLOCK)


def test_two_workers_with_half_the_memory_each_fit_beside_each_other() -> None:
    first = blocks(H200, utilization=0.45)
    held = H200.taken + first * BLOCK
    beside = GpuMemory(H200.total, H200.free - held, H200.weights, H200.activations, H200.graphs)
    assert blocks(beside, utilization=0.45) == first


def test_too_little_for_one_sequence_is_refused_with_all_numbers() -> None:
    with pytest.raises(ConfigError) as refusal:
        blocks(GpuMemory(24 * GIB, 23 * GIB, 16 * GIB, 2 * GIB, GIB))
    assert refusal.value.param == "gpu_memory_utilization"
    for number in ("24.00 GiB", "23.00 GiB of it free", "16.00 GiB for weights", "2.00 GiB for activations",
                   "1.00 GiB for CUDA graphs", "5.62 GiB for one sequence of max_model_len=40960", "2.60 GiB"):
        assert number in refusal.value.message


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    check_weights(16 * GIB, 16 * GIB)
    with pytest.raises(ConfigError, match=r"weights take 16\.00 GiB, but 15\.00 GiB"):
        check_weights(15 * GIB, 16 * GIB)
