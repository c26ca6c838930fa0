"""out = silu(gate) * up, over the fused output of one matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl


def reference(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_rows, 2 * size], gate then up → [num_rows, size]; the activation in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def _kernel(
    gate_up_ptr,  # [num_rows, 2 * size]
    out_ptr,  # [num_rows, size]
    size, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """As `reference`, into `out`."""
    num_rows, size = out.shape
    assert gate_up.shape == (num_rows, 2 * size) and gate_up.is_contiguous() and out.is_contiguous()
    block = min(triton.next_power_of_2(size), 1024)
    _kernel[(num_rows, triton.cdiv(size, block))](gate_up, out, size, BLOCK=block, num_warps=4)
