from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv_cache import KvCache, block_bytes
from engine.model_config import ModelConfig
from tests.factories import tiny_llama


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_folder(tiny_llama(tmp_path))


def _kv(num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, 2, 2, 16)


def test_the_layout_is_block_major_and_a_block_is_one_run_of_bytes(model: ModelConfig) -> None:
    cache = KvCache(model, num_blocks=5, block_size=4, dtype=torch.float32)
    assert cache.blocks.shape == (5, 2, 2, 2, 4, 16)
    assert cache.blocks[3].is_contiguous()
    assert cache.blocks.stride(0) * 4 == cache.block_bytes == block_bytes(model, 4, torch.float32) == 2 * 2 * 2 * 4 * 64


def test_tokens_land_in_their_slots_and_nowhere_else(model: ModelConfig) -> None:
    cache = KvCache(model, num_blocks=5, block_size=4, dtype=torch.float32)
    kv = _kv(3)
    cache.write(1, cache.slots(torch.tensor([9, 2, 19])), kv)
    for token, (block, offset) in enumerate([(2, 1), (0, 2), (4, 3)]):  # 19 is the last slot of the last block
        assert torch.equal(cache.blocks[block, 1, :, :, offset], kv[token])
    assert int((cache.blocks != 0).sum()) == kv.numel()


def test_a_padding_token_is_not_written(model: ModelConfig) -> None:
    cache = KvCache(model, num_blocks=5, block_size=4, dtype=torch.float32)
    kv = _kv(3)
    cache.write(0, cache.slots(torch.tensor([-1, 6, -1])), kv)
    assert torch.equal(cache.blocks[1, 0, :, :, 2], kv[1])
    assert int((cache.blocks != 0).sum()) == kv[1].numel()


def test_a_slot_beyond_the_pool_is_an_error_not_a_write(model: ModelConfig) -> None:
    cache = KvCache(model, num_blocks=5, block_size=4, dtype=torch.float32)
    with pytest.raises(IndexError):
        cache.write(0, cache.slots(torch.tensor([20])), _kv(1))


def test_strip_ids_address_the_last_block_of_the_last_layer(model: ModelConfig) -> None:
    cache = KvCache(model, num_blocks=5, block_size=4, dtype=torch.float32)
    cache.blocks.copy_(torch.arange(cache.blocks.numel()).view(cache.blocks.shape))
    ids = cache.strip_ids(torch.tensor([[4, 0]])) + cache.strips_per_layer
    assert ids.dtype == torch.int64
    assert int(ids.max()) == len(cache.strips) - 1
    gathered = cache.strips[ids.flatten()].view(2, 1, 2, 2, 4, 16)  # [K/V, rows, heads, columns, slots, head_dim]
    for kv in range(2):
        for head in range(2):
            assert torch.equal(gathered[kv, 0, head, 0], cache.blocks[4, 1, kv, head])
            assert torch.equal(gathered[kv, 0, head, 1], cache.blocks[0, 1, kv, head])


def test_offsets_do_not_overflow_32_bits_in_a_large_pool(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 128}
    shape |= {"num_attention_heads": 6, "num_key_value_heads": 6}
    wide = ModelConfig.from_folder(tiny_llama(tmp_path, **shape))
    num_blocks = 2**31 // (2 * 6 * 64 * 128) + 2  # more than 2**31 elements; the pages stay untouched
    cache = KvCache(wide, num_blocks, block_size=64, dtype=torch.bfloat16)
    assert cache.blocks.numel() > 2**31
    kv = torch.randn(1, 2, 6, 128).bfloat16()
    cache.write(0, cache.slots(torch.tensor([num_blocks * 64 - 1])), kv)
    strips = cache.strips[cache.strip_ids(torch.tensor([[num_blocks - 1]])).flatten()].view(2, 6, 64, 128)
    assert torch.equal(strips[:, :, 63], kv[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_view_is_the_block_itself(model: ModelConfig, dtype: torch.dtype) -> None:
    cache = KvCache(model, num_blocks=5, block_size=4, dtype=dtype)
    cache.blocks.normal_()
    view = cache.block_view(3)
    assert (len(view), view.readonly, view.c_contiguous) == (cache.block_bytes, False, True)
    assert bytes(view) == bytes(cache.blocks[3].view(torch.uint8).numpy().tobytes())
    cache.block_view(0)[:] = view
    assert torch.equal(cache.blocks[0], cache.blocks[3])
    for outside in (-1, 5):
        with pytest.raises(IndexError, match="outside the pool of 5"):
            cache.block_view(outside)
