"""residual += x; out = rms_norm(residual) * weight. One program per row, one pass over the bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, the new residual), each [num_rows, hidden]; sums and norms in float32."""
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype), total


@triton.jit
def _kernel(
    x_ptr,  # [num_rows, hidden]
    residual_ptr,  # [num_rows, hidden], read and written
    weight_ptr,  # [hidden]
    out_ptr,  # [num_rows, hidden]
    hidden, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    at = row * hidden + columns
    total = tl.load(x_ptr + at, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        before = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + before).to(total.dtype)
    tl.store(residual_ptr + at, total, mask=inside)
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    tl.store(out_ptr + at, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, first: bool,
) -> None:
    """As `reference`, into `out` and `residual`. `first`: there is no residual yet, and x becomes it."""
    num_rows, hidden = x.shape
    assert x.is_contiguous() and residual.is_contiguous() and out.is_contiguous() and weight.shape == (hidden,)
    block = triton.next_power_of_2(hidden)
    _kernel[(num_rows,)](
        x, residual, weight, out, hidden, eps, HAS_RESIDUAL=not first, BLOCK=block,
        num_warps=min(16, max(1, block // 512)))
