"""A step's changes of device state."""

from __future__ import annotations

import pytest
import torch

from kernels.scatter_words import scatter_words
from tests.kernel_mode import DEVICE


@pytest.mark.parametrize("num", [1, 256, 300])
def test_named_words_change_and_no_others(num: int) -> None:
    target = torch.randint(0, 1000, (1000,), dtype=torch.int32, device=DEVICE)
    changes = torch.zeros(2, 512, dtype=torch.int32, device=DEVICE)
    changes[0, :num] = torch.randperm(1000, device=DEVICE)[:num]
    changes[1] = torch.arange(512, device=DEVICE) - 2**31
    expected = target.clone()
    expected[changes[0, :num].long()] = changes[1, :num]
    scatter_words(target, changes, num)
    assert torch.equal(target, expected)
