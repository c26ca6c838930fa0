"""Kernels run for real where there is a GPU, and in Triton's interpreter elsewhere.

To be imported before triton: its own functions are made for one of the two when it is imported.
"""

from __future__ import annotations

import os
import sys

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
# The interpreter multiplies bfloat16 wrongly, and a GPU's float16 is nobody's choice here.
DTYPES = (torch.bfloat16, torch.float32) if ON_GPU else (torch.float16, torch.float32)
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of relative errors

if not ON_GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("triton was imported without its interpreter before tests.kernel_mode")
    os.environ["TRITON_INTERPRET"] = "1"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found - expected‖ / ‖expected‖; infinite where a number is missing."""
    found, expected = found.double(), expected.double()
    error = float((found - expected).norm() / expected.norm())
    return error if error == error else float("inf")


def rotary(max_len: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin [max_len, head_dim] float32, on the device."""
    frequencies = 1 / 10000 ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(max_len).float()[:, None] * frequencies[None]
    cos, sin = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    return cos.contiguous().to(DEVICE), sin.contiguous().to(DEVICE)
