"""The gated activation against plain torch."""

from __future__ import annotations

import pytest
import torch

from kernels.silu_mul import reference, silu_mul
from tests.kernel_mode import DEVICE, DTYPES, LIMITS, ON_GPU, relative_error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [12288, 3072, 1536, 100] if ON_GPU else [1536, 100])
def test_activation_is_the_references(dtype: torch.dtype, size: int) -> None:
    gate_up = torch.randn(3, 2 * size, device=DEVICE).to(dtype) * 4
    whole = torch.full((5, size), float("nan"), device=DEVICE, dtype=dtype)
    silu_mul(gate_up, whole[1:4])
    assert relative_error(whole[1:4], reference(gate_up)) < LIMITS[dtype]
    assert whole[0].isnan().all()
    assert whole[4].isnan().all()
