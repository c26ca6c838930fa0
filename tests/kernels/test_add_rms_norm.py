"""The sum and its norm against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm, reference
from tests.kernel_mode import DEVICE, DTYPES, LIMITS, ON_GPU, relative_error

SIZES = (4096, 1024, 576, 100) if ON_GPU else (576, 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("first", [False, True])
def test_sum_and_norm_are_the_references(dtype: torch.dtype, hidden: int, first: bool) -> None:
    x, before = torch.randn(2, 5, hidden, device=DEVICE).to(dtype)
    weight = (torch.rand(hidden, device=DEVICE) + 0.5).to(dtype)
    residual, out = before.clone(), torch.full_like(x, float("nan"))
    expected, total = reference(x, None if first else before, weight, 1e-5)
    add_rms_norm(x, residual, weight, 1e-5, out, first=first)
    assert relative_error(out, expected) < LIMITS[dtype]
    assert torch.equal(residual, total)


def test_rows_beside_the_given_ones_stay() -> None:
    x, residual, out = torch.randn(3, 4, 100, device=DEVICE)
    kept = residual.clone(), out.clone()
    add_rms_norm(x[1:3], residual[1:3], torch.ones(100, device=DEVICE), 1e-5, out[1:3], first=False)
    for after, before in zip((residual, out), kept, strict=True):
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[3], before[3])
