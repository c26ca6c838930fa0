"""Kernels that go over rows of activations: norms, activation, positions and the KV write."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from bench.figures import Figure
from bench.kernels_area.graph_time import Ceilings, copies_needed, moved
from engine.models.parts import Sizes
from kernels.add_rms_norm import add_rms_norm
from kernels.rope_write import rope_write
from kernels.silu_mul import silu_mul

_EPS = 1e-6


def measure(sizes: Sizes, num_rows: int, ceilings: Ceilings, device: torch.device) -> Iterator[Figure]:
    yield from _norm(sizes, num_rows, ceilings, device)
    yield from _activation(sizes, num_rows, ceilings, device)
    yield from _rope(sizes, num_rows, ceilings, device)


def _norm(sizes: Sizes, num_rows: int, ceilings: Ceilings, device: torch.device) -> list[Figure]:
    num_bytes = 4 * num_rows * sizes.hidden * 2
    sets = torch.randn(copies_needed(num_bytes), 3, num_rows, sizes.hidden, device=device).bfloat16()
    weight = torch.ones(sizes.hidden, device=device, dtype=torch.bfloat16)
    ours = [partial(add_rms_norm, x, residual, weight, _EPS, out, first=False) for x, residual, out in sets]

    def peer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(residual.add_(x), (sizes.hidden,), weight, _EPS)

    theirs = [partial(peer, x, residual) for x, residual, _ in sets]
    return moved(f"add + RMSNorm, {num_rows} rows", num_bytes, ours, ceilings, "add_, F.rms_norm", theirs)


def _activation(sizes: Sizes, num_rows: int, ceilings: Ceilings, device: torch.device) -> list[Figure]:
    num_bytes = 3 * num_rows * sizes.intermediate * 2
    sets = torch.randn(copies_needed(num_bytes), num_rows, 2 * sizes.intermediate, device=device).bfloat16()
    out = torch.empty(len(sets), num_rows, sizes.intermediate, device=device, dtype=torch.bfloat16)
    ours = [partial(silu_mul, gate_up, place) for gate_up, place in zip(sets, out, strict=True)]

    def peer(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    return moved(f"SiLU * up, {num_rows} rows", num_bytes, ours, ceilings, "F.silu, mul",
                 [partial(peer, gate_up) for gate_up in sets])


def _rope(sizes: Sizes, num_rows: int, ceilings: Ceilings, device: torch.device) -> list[Figure]:
    num_all = sizes.num_heads + 2 * sizes.num_kv_heads
    num_bytes = 2 * num_rows * num_all * sizes.head_dim * 2
    sets = torch.randn(copies_needed(num_bytes), num_rows, num_all, sizes.head_dim, device=device).bfloat16()
    norms = torch.ones(num_all - sizes.num_kv_heads, sizes.head_dim, device=device, dtype=torch.bfloat16)
    cos = torch.rand(num_rows, sizes.head_dim, device=device)
    num_blocks = -(-num_rows // 64)
    cache = torch.zeros(num_blocks, 1, 2, sizes.num_kv_heads, 64, sizes.head_dim, device=device, dtype=torch.bfloat16)
    positions = torch.arange(num_rows, dtype=torch.int32, device=device)
    ours = [partial(rope_write, qkv, norms, _EPS, cos, cos, positions, positions.long(), cache[:, 0], sizes.num_heads)
            for qkv in sets]
    return moved(f"head norms + rope + KV write, {num_rows} tokens", num_bytes, ours, ceilings)
