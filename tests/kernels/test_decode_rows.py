"""What a decode step reads from the sequences' rows, and what it writes back."""

from __future__ import annotations

import torch

from kernels.decode_rows import advance, gather
from tests.kernel_mode import DEVICE


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_gather_gives_token_position_length_and_slot_of_each_row_and_none_to_padding() -> None:
    tables = torch.arange(40, dtype=torch.int32, device=DEVICE).view(4, 10) + 100
    rows, last_tokens, num_computed = _ints(2, -1, 0), _ints(7, 8, 9, 10), _ints(15, 3, 16, 4)
    wide, narrow = torch.full((2, 3), -9, device=DEVICE), torch.full((2, 3), -9, dtype=torch.int32, device=DEVICE)
    gather(rows, last_tokens, num_computed, tables, 16, wide[0], narrow[0], narrow[1], wide[1])
    assert wide.tolist() == [[9, 0, 7], [(120 + 1) * 16, -1, 100 * 16 + 15]]
    assert narrow.tolist() == [[16, 0, 15], [17, 0, 16]]


def test_slots_of_a_large_pool_are_64_bit() -> None:
    tables = torch.full((1, 2), 2**27 + 5, dtype=torch.int32, device=DEVICE)
    wide = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    narrow = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    gather(_ints(0), _ints(1), _ints(66), tables, 64, wide[0], narrow[0], narrow[1], wide[1])
    assert wide[1].item() == (2**27 + 5) * 64 + 2


def test_advance_moves_the_rows_that_drew_and_no_others() -> None:
    last_tokens, num_computed, positions = _ints(7, 8, 9, 10), _ints(15, 3, 16, 4), _ints(1, 2, 3, 4)
    advance(_ints(2, -1, 0), torch.tensor([50, 51, 52], device=DEVICE), last_tokens, num_computed, positions)
    assert last_tokens.tolist() == [52, 8, 50, 10]
    assert num_computed.tolist() == [16, 3, 17, 4]
    assert positions.tolist() == [2, 2, 4, 4]


def test_advance_by_nothing_only_replaces_the_last_tokens() -> None:
    last_tokens, num_computed, positions = _ints(7, 8), _ints(15, 3), _ints(1, 2)
    advance(_ints(1, -1), torch.tensor([50, 51], device=DEVICE), last_tokens, num_computed, positions, by=0)
    assert last_tokens.tolist() == [7, 50]
    assert (num_computed.tolist(), positions.tolist()) == ([15, 3], [1, 2])


def test_a_draw_that_failed_leaves_a_token_that_can_be_read() -> None:
    last_tokens, others = _ints(7), _ints(1)
    advance(_ints(0), torch.tensor([-1], device=DEVICE), last_tokens, others, others.clone())
    assert last_tokens.tolist() == [0]
