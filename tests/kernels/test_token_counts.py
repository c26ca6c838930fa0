"""Which ids a sequence has seen."""

from __future__ import annotations

import torch

from kernels.token_counts import learn, record, reference
from tests.kernel_mode import DEVICE


def test_prompt_and_outputs_are_counted_as_by_the_reference() -> None:
    token_ids = torch.randint(0, 50, (1500,), dtype=torch.int32, device=DEVICE)
    histories = torch.zeros(2, 60, dtype=torch.int32, device=DEVICE)
    learn(histories, 1, token_ids, 30)
    assert torch.equal(histories[1], reference(token_ids, 30, 60))
    assert not histories[0].any()


def test_draws_are_recorded_for_rows_with_a_history_only() -> None:
    histories = torch.zeros(2, 60, dtype=torch.int32, device=DEVICE)
    history_of = torch.tensor([0, 2, 1], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([1, 0, -1, 2], dtype=torch.int32, device=DEVICE)
    drawn = torch.tensor([7, 8, 9, 59], device=DEVICE)
    for _ in range(2):
        record(histories, history_of, rows, drawn)
    assert histories.nonzero().tolist() == [[0, 59], [1, 7]]
    assert histories[1, 7].item() == 4
