"""Tables of rotary positions: one pair of cos and sin for each rope that a model has."""

from __future__ import annotations

import math

import torch

from engine.models.parts import LinearScaling, Llama3Scaling, Rope, YarnScaling


def rotary_tables(rope: Rope, head_dim: int, max_len: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, each [max_len, 1, head_dim], for `x * cos + roll(x, head_dim / 2) * sin`.

    Over the two halves of a head (interleaved ropes have changed their order at load). Computed in float32, as
    transformers does.
    """
    frequencies, scale = _frequencies(rope, head_dim)
    angles = torch.arange(max_len).float()[:, None] * frequencies[None, :]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def _frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians a position for each pair of dimensions, [head_dim / 2] float32, and what cos and sin are times."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor):
            return plain / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, rope.theta, scaling), scaling.attention_factor


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """The share that is kept rises from 0 at `low_freq_factor` turns in the original context to 1 at the high one."""
    turns = scaling.original_len * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _mixed(plain, scaling.factor, kept.clamp(0, 1))


def _yarn(plain: torch.Tensor, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """The share that is kept falls from 1 to 0 between the dimensions that turn `beta_fast` and `beta_slow` times."""
    size = 2 * len(plain)

    def dimension(turns: float) -> float:
        return size * math.log(scaling.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first if last != first else 0.001
    kept = 1 - ((torch.arange(len(plain)).float() - first) / width).clamp(0, 1)
    return _mixed(plain, scaling.factor, kept)


def _mixed(plain: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    return plain * kept + plain / factor * (1 - kept)
