"""Head norms, positions and the KV write against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.rope_write import reference, rope_write
from tests.kernel_mode import DEVICE, DTYPES, LIMITS, ON_GPU, relative_error, rotary

SHAPES = ((32, 8, 128, 64), (16, 8, 128, 64), (9, 3, 64, 16), (14, 2, 64, 16)) if ON_GPU else ((9, 3, 64, 16),)
NUM_TOKENS = (100, 5) if ON_GPU else (5,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("has_norms", "keeps_k"), [(True, False), (False, False), (True, True)])
def test_q_turns_in_place_and_k_and_v_go_to_their_slots_only(
    dtype: torch.dtype, shape: tuple[int, int, int, int], num_tokens: int, has_norms: bool, keeps_k: bool
) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    pool = torch.randn(20, 3, 2, num_kv_heads, block_size, head_dim, device=DEVICE).to(dtype)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE).to(dtype)
    norms = (torch.rand(num_heads + num_kv_heads, head_dim, device=DEVICE) + 0.5).to(dtype) if has_norms else None
    cos, sin = rotary(500, head_dim)
    positions = torch.randint(0, 500, (num_tokens,), dtype=torch.int32, device=DEVICE)
    slots = torch.randperm(20 * block_size, device=DEVICE)[:num_tokens]
    slots[3] = -1
    q, k, v = reference(qkv, norms, 1e-6, cos, sin, positions.long(), num_kv_heads)
    expected, kept = pool.clone(), slots >= 0
    blocks, places = slots[kept] // block_size, slots[kept] % block_size
    expected[blocks, 1, 0, :, places], expected[blocks, 1, 1, :, places] = k[kept], v[kept]
    before = qkv[:, num_heads:].clone()
    rope_write(qkv, norms, 1e-6, cos, sin, positions, slots, pool[:, 1], num_heads, keeps_k=keeps_k)
    assert relative_error(qkv[:, :num_heads], q) < LIMITS[dtype]
    if keeps_k:
        turned, before = qkv[:, num_heads:-num_kv_heads].clone(), before[:, num_kv_heads:]
        assert relative_error(turned, k) < LIMITS[dtype]
    assert torch.equal(qkv[:, -before.shape[1] :], before)
    pool[blocks, 1, 0, :, places] -= expected[blocks, 1, 0, :, places]
    assert pool[blocks, 1, 0, :, places].abs().max() < 20 * LIMITS[dtype]
    pool[blocks, 1, 0, :, places] = expected[blocks, 1, 0, :, places]
    assert torch.equal(pool, expected)
