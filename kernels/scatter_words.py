"""target[index[i]] = value[i] over 32-bit words: a step's few changes of device state in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_changes", "capacity"])  # they are others in each step
def _kernel(
    target_ptr,  # [.] int32
    changes_ptr,  # [2, capacity] int32: indices, then values
    num_changes, capacity, SIZE: tl.constexpr,
):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = i < num_changes
    index = tl.load(changes_ptr + i, mask=inside, other=0)
    value = tl.load(changes_ptr + capacity + i, mask=inside, other=0)
    tl.store(target_ptr + index, value, mask=inside)


def scatter_words(target: torch.Tensor, changes: torch.Tensor, num_changes: int) -> None:
    """`changes` [2, capacity] int32 on the device; indices are within `target` [.] int32 and differ from each other."""
    assert target.dtype == changes.dtype == torch.int32 and changes.is_contiguous()
    _kernel[(triton.cdiv(num_changes, 256),)](
        target, changes, num_changes, changes.shape[1], SIZE=256, num_warps=4)
