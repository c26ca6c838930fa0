from __future__ import annotations

from pathlib import Path

import pytest
import torch

import engine.cpu_attention
from engine.cpu_attention import CpuAttention
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.ragged_batch import build_batch
from engine.step import StepPlan
from tests.factories import planned_row, tiny_llama

LAYER, BLOCK_SIZE, SCALE = 1, 4, 0.3
# (tokens, start, block table): single tokens of unlike context, a fresh chunk, a chunk over a cached prefix;
# blocks 7 and 3 are shared by two rows. The table may be longer than the context.
ROWS = [
    (1, 0, [20]), (1, 6, [7, 3]), (1, 8, [7, 3, 12, 25]), (1, 30, [31, 5, 22, 18, 2, 9, 14, 0]),
    (1, 29, [21, 4, 26, 27, 28, 29, 30, 1]), (6, 0, [10, 13]), (5, 5, [6, 8, 11]),
]


def _dense(cache: KvCache, q: torch.Tensor, start: int, table: list[int], window: int | None) -> torch.Tensor:
    """Softmax attention of one row in float64, position by position, straight from the blocks."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // cache.num_kv_heads
    for i in range(len(q)):
        positions = range(max(0, start + i + 1 - window) if window else 0, start + i + 1)
        slots = [(table[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in positions]
        kv = torch.stack([cache.blocks[block, LAYER, :, :, offset] for block, offset in slots]).double()
        for head in range(q.shape[1]):
            k, v = kv[:, 0, head // group], kv[:, 1, head // group]
            weights = torch.softmax(k @ q[i, head].double() * SCALE, dim=0)
            out[i, head] = weights @ v
    return out.flatten(1)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (4, 1)], ids=["three to one", "one to one", "one kv head"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 64])
@pytest.mark.parametrize("group_bytes", [1, 3000, 1 << 20], ids=["alone", "in small groups", "in one group"])
def test_a_ragged_batch_equals_dense_windowed_attention_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], group_bytes: int, window: int | None
) -> None:
    monkeypatch.setattr(engine.cpu_attention, "_GROUP_BYTES", group_bytes)
    num_heads, num_kv_heads = heads
    model = ModelConfig.from_folder(
        tiny_llama(tmp_path, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads))
    torch.manual_seed(0)
    cache = KvCache(model, 32, BLOCK_SIZE, torch.float32)
    cache.blocks.normal_()
    batch = build_batch(StepPlan(1, [planned_row([0] * n, table, start=start) for n, start, table in ROWS]), BLOCK_SIZE)
    num_tokens = len(batch.token_ids)
    q, kv = torch.randn(num_tokens, num_heads, 16), torch.randn(num_tokens, 2, num_kv_heads, 16)
    attention = CpuAttention(cache, batch.rows, torch.from_numpy(batch.slot_mapping))
    out = attention(LAYER, q, kv, SCALE, window)
    for row in batch.rows:
        tokens = slice(row.first, row.first + row.q_len)
        expected = _dense(cache, q[tokens], row.start, row.blocks.tolist(), window)
        torch.testing.assert_close(out[tokens].double(), expected, rtol=0, atol=2e-6)


def test_other_layers_are_neither_read_nor_written(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(tiny_llama(tmp_path))
    cache = KvCache(model, 8, BLOCK_SIZE, torch.float32)
    cache.blocks[:, 0] = float("nan")
    batch = build_batch(StepPlan(1, [planned_row([0] * 5, [7, 2])]), BLOCK_SIZE)
    attention = CpuAttention(cache, batch.rows, torch.from_numpy(batch.slot_mapping))
    out = attention(1, torch.randn(5, 6, 16), torch.randn(5, 2, 2, 16), SCALE, None)
    assert bool(out.isfinite().all())
    assert bool(cache.blocks[:, 0].isnan().all())


def test_a_window_reads_no_block_that_it_hides(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(tiny_llama(tmp_path))
    cache = KvCache(model, 8, BLOCK_SIZE, torch.float32)
    cache.blocks[[7, 2]] = float("nan")  # positions 0 to 7; the first query at 12 sees from 8 on
    rows = [planned_row([0], [7, 2, 5, 1], start=12), planned_row([0] * 3, [7, 2, 4, 6], start=12)]
    batch = build_batch(StepPlan(1, rows), BLOCK_SIZE)
    attention = CpuAttention(cache, batch.rows, torch.from_numpy(batch.slot_mapping))
    q, kv = torch.randn(4, 4, 16), torch.randn(4, 2, 2, 16)
    assert bool(attention(1, q, kv, SCALE, 5).isfinite().all())
    assert bool(attention(1, q, kv, SCALE, 6).isnan().any())
