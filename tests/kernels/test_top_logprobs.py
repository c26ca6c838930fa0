"""Log-probabilities of drawn tokens and of the likeliest."""

from __future__ import annotations

import pytest
import torch

from kernels.top_logprobs import MAX_TOP, LogprobScratch, reference, top_logprobs
from tests.kernel_mode import DEVICE, DTYPES, ON_GPU

VOCAB, SLICE = (151936, 4096) if ON_GPU else (700, 256)


def _found(
    logits: torch.Tensor, drawn: torch.Tensor, wanted: list[int], rows: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    scratch = LogprobScratch.make(len(rows) + 1, logits.shape[1], DEVICE, SLICE)
    words = top_logprobs(
        logits, torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        torch.tensor(wanted, dtype=torch.int32, device=DEVICE), drawn, scratch, SLICE)
    return words[:, : MAX_TOP + 1], words[:, MAX_TOP + 1 :].view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_and_scores_are_the_references(dtype: torch.dtype) -> None:
    logits = (torch.randn(4, VOCAB, device=DEVICE) * 3).to(dtype)  # in 16 bits many are equal
    logits[1, :40] = 11.0
    drawn = torch.tensor([3, VOCAB - 1, 30, 0], device=DEVICE)
    ids, scores = _found(logits, drawn, [1, MAX_TOP + 1, 4, 0], [1, 2, 0, -1])
    expected_ids, expected = reference(logits, drawn, MAX_TOP)
    for row, num in enumerate((1 + MAX_TOP, 4, 1)):
        assert ids[row, :num].tolist() == expected_ids[row, :num].tolist()
        assert (scores[row, :num].double() - expected[row, :num]).abs().max() < 1e-4
        assert not scores[row, num:].any()
    assert not ids[3].any()


def test_logits_of_minus_infinity_and_both_zeros() -> None:
    logits = torch.full((1, 300), float("-inf"), device=DEVICE)
    logits[0, 9], logits[0, 7], logits[0, 8], logits[0, 2] = 0.0, -0.0, 1.0, -200.0
    ids, scores = _found(logits, torch.tensor([8], device=DEVICE), [5], [0])
    assert ids[0, :5].tolist() == [8, 8, 7, 9, 2]
    assert scores[0, 2].item() == scores[0, 3].item()
    assert scores[0, :5].isfinite().all()
