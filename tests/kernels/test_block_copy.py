"""Whole blocks between pool and staging, and within the pool."""

from __future__ import annotations

import pytest
import torch

from kernels.block_copy import copy_blocks, gather_blocks, independent, scatter_blocks
from tests.kernel_mode import DEVICE, DTYPES, ON_GPU

SHAPE = (36, 2, 8, 64, 128) if ON_GPU else (3, 2, 3, 16, 64)


def _ids(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("num_programs", [1, 5, 1024])
def test_gathered_and_scattered_blocks_are_the_pools_and_no_others_change(num_programs: int) -> None:
    pool = torch.randn(9, *SHAPE, device=DEVICE).to(DTYPES[0])
    staging = torch.zeros(4, *SHAPE, dtype=DTYPES[0], device=DEVICE)
    gather_blocks(pool, _ids(8, 0, 3), staging, num_programs)
    assert torch.equal(staging[:3], pool[[8, 0, 3]])
    assert not staging[3].any()
    expected = pool.clone()
    expected[[5, 7]] = staging[:2]
    scatter_blocks(staging, _ids(5, 7), pool, num_programs)
    assert torch.equal(pool, expected)


def test_copies_within_the_pool() -> None:
    pool = torch.randn(5, 3, 2, 1, 16, 7, device=DEVICE)  # a size that no tile divides
    expected = pool.clone()
    expected[[4, 1]] = pool[[0, 0]]
    copy_blocks(pool, _ids(0, 0), _ids(4, 1))
    assert torch.equal(pool, expected)


def test_nothing_to_copy_is_no_launch() -> None:
    pool = torch.ones(2, 4, device=DEVICE)
    copy_blocks(pool, _ids(), _ids())
    assert torch.equal(pool, torch.ones_like(pool))


def test_copies_that_need_an_order_are_in_different_runs() -> None:
    assert independent([]) == []
    assert independent([(0, 1), (0, 2), (3, 4)]) == [[(0, 1), (0, 2), (3, 4)]]
    assert independent([(0, 1), (1, 2)]) == [[(0, 1)], [(1, 2)]]
    assert independent([(0, 1), (5, 0), (2, 1)]) == [[(0, 1)], [(5, 0), (2, 1)]]
    assert independent([(0, 1), (2, 1)]) == [[(0, 1)], [(2, 1)]]


@pytest.mark.skipif(not ON_GPU, reason="needs 9 GB")
def test_the_last_block_of_a_pool_beyond_32_bit_offsets() -> None:
    num = 2**33 // (2 * 36 * 2 * 8 * 64 * 128) + 9
    pool = torch.zeros(num, *SHAPE, dtype=torch.bfloat16, device=DEVICE)
    pool[num - 1] = torch.randn(SHAPE, device=DEVICE)
    copy_blocks(pool, _ids(num - 1), _ids(num - 2))
    assert torch.equal(pool[num - 2], pool[num - 1])
    assert not pool[num - 3].any()
