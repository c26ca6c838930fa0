"""Attention of chunks over cached prefix and themselves against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.block_strips import strips_of
from kernels.extend_attention import extend_attention, make_tiles, reference, tile_tokens
from tests.kernel_mode import DEVICE, DTYPES, LIMITS, ON_GPU, relative_error


def _check(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, starts: list[int], q_lens: list[int],
    dtype: torch.dtype, num_blocks: int = 0, padding: int = 1,
) -> None:
    most = max(-(-(start + length) // block_size) for start, length in zip(starts, q_lens, strict=True))
    size = num_blocks or most * len(starts) + 2
    pool = torch.zeros(size, 2, 2, num_kv_heads, block_size, head_dim, dtype=dtype, device=DEVICE)
    ids = torch.arange(size - most * len(starts), size, device=DEVICE)
    pool[ids] = torch.randn(len(ids), *pool.shape[1:], device=DEVICE).to(dtype)
    tables = ids[torch.randperm(len(ids), device=DEVICE)].view(len(starts), most).to(torch.int32)
    first = 3  # flat tokens of others before and after
    firsts = [first + sum(q_lens[:i]) for i in range(len(q_lens))]
    num_tokens = first + sum(q_lens) + 2
    q = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE).to(dtype)
    out = torch.full((num_tokens, num_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
    group = num_heads // num_kv_heads
    tiles = make_tiles(list(range(len(starts))), firsts, starts, q_lens, group)
    tiles = torch.cat((tiles, torch.zeros(padding, 4, dtype=torch.int32))).to(DEVICE)
    extend_attention(q, pool, strips_of(pool), 1, tables, tiles, head_dim**-0.5, out)
    mine = slice(first, num_tokens - 2)
    expected = reference(
        q[mine, :num_heads], pool[:, 1], tables, torch.tensor(starts), torch.tensor(q_lens), head_dim**-0.5)
    assert relative_error(out[mine], expected) < LIMITS[dtype]
    assert out[:first].isnan().all()
    assert out[-2:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (2, 1), (9, 3), (4, 1), (14, 2), (8, 1)])
def test_every_group_size_attends_as_the_reference(num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> None:
    _check(num_heads, num_kv_heads, 64, 16, [0, 21], [19, 3], dtype)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 64), *([(64, 64), (128, 16)] if ON_GPU else [])])
def test_chunks_that_begin_and_end_at_and_beside_a_blocks_end(head_dim: int, block_size: int) -> None:
    starts, q_lens = [block_size, block_size - 1, 0, 1], [block_size, 1, block_size, 1]
    _check(4, 2, head_dim, block_size, starts, q_lens, DTYPES[0])


def test_a_chunk_of_several_tiles() -> None:
    assert tile_tokens(7) == tile_tokens(8) == 16
    _check(14, 2, 64, 16, [5], [40], torch.float32, padding=0)


def test_tiles_with_the_longest_context_come_first() -> None:
    tiles = make_tiles([4, 5], [0, 20], [100, 0], [20, 40], 8)
    assert tiles.tolist() == [
        [4, 16, 116, 4], [4, 0, 100, 16], [5, 52, 32, 8], [5, 36, 16, 16], [5, 20, 0, 16]]


@pytest.mark.skipif(not ON_GPU, reason="too much for the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim", "block_size"),
                         [(32, 8, 128, 64), (16, 8, 128, 64), (9, 3, 64, 16), (14, 2, 64, 64)])
def test_chunks_of_real_shapes(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    _check(num_heads, num_kv_heads, head_dim, block_size, [0, 130, 64, 1000], [200, 1, 77, 300], dtype)


@pytest.mark.skipif(not ON_GPU, reason="needs 9 GB")
def test_the_last_blocks_of_a_pool_beyond_32_bit_offsets() -> None:
    per_block = 2 * 2 * 8 * 64 * 128
    _check(32, 8, 128, 64, [100, 0], [90, 65], torch.bfloat16, num_blocks=2**32 // per_block + 9)
