"""top_k and top_p without a sort: exactly the tokens that sorting leaves."""

from __future__ import annotations

import pytest
import torch

from kernels.truncate_logits import TruncateScratch, reference, truncate_logits
from tests.kernel_mode import DEVICE, ON_GPU

VOCAB, SLICE = (151936, 4096) if ON_GPU else (500, 256)
ROWS = [2, -1, 0, 3]


def _truncated(
    logits: torch.Tensor, temperatures: list[float], top_ks: list[int], top_ps: list[float], *, is_half: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected) of rows `ROWS`, whose parameters are at places 0 .. 3."""
    scratch = TruncateScratch.make(8, logits.shape[1], DEVICE, SLICE)
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % SLICE), value=float("-inf"))
    scratch.maxes[1, : len(logits)] = padded.view(len(logits), -1, SLICE).amax(-1)
    rows = torch.tensor(ROWS[: len(logits)], dtype=torch.int32, device=DEVICE)
    given = (torch.tensor(temperatures, device=DEVICE), torch.tensor(top_ks, dtype=torch.int32, device=DEVICE),
             torch.tensor(top_ps, device=DEVICE))
    found = logits.clone()
    truncate_logits(found, rows, *given, scratch, by_count=any(top_ks), by_mass=min(top_ps) < 1, is_half=is_half,
                    slice_size=SLICE)
    return found, reference(logits, rows, *given)


def _logits(num: int, *, is_half: bool) -> torch.Tensor:
    logits = torch.randn(num, VOCAB, device=DEVICE) * 3
    return logits.bfloat16().float() if is_half else logits


@pytest.mark.parametrize("is_half", [False, True] if ON_GPU else [True])
def test_the_k_largest_stay_and_of_equal_ones_the_lower_ids(is_half: bool) -> None:
    logits = _logits(4, is_half=is_half)
    logits[2, 150:400] = 13.0  # equal, over two slices, and the bound lies among them
    found, expected = _truncated(
        logits, [1.0] * 4, [160, 1, 50, VOCAB + 5], [1.0] * 4, is_half=is_half)
    assert torch.equal(found, expected)
    assert (found > float("-inf")).sum(1).tolist() == [50, VOCAB, 160, VOCAB]


@pytest.mark.parametrize("is_half", [False, True] if ON_GPU else [False])
def test_the_nucleus_is_the_sorted_one_but_for_a_token_at_its_edge(is_half: bool) -> None:
    logits = _logits(4, is_half=is_half)
    found, expected = _truncated(logits, [1.0, 0.5, 2.0, 1e-6], [0] * 4, [0.9, 0.3, 0.999, 0.5], is_half=is_half)
    is_kept, should_be = found > float("-inf"), expected > float("-inf")
    assert (is_kept != should_be).sum(1).max() <= (3 if ON_GPU else 0)
    assert is_kept[3].sum() == 1
    assert torch.equal(found[is_kept], logits[is_kept])


def test_the_nucleus_of_the_k_largest() -> None:
    logits = _logits(4, is_half=True)
    found, expected = _truncated(logits, [1.0] * 4, [40, 3, 0, 7], [0.8, 1.0, 0.2, 0.01], is_half=True)
    assert torch.equal(found, expected)


def test_of_equal_logits_the_lowest_that_reach_the_mass_stay() -> None:
    found, _ = _truncated(torch.zeros(3, VOCAB, device=DEVICE), [1.0] * 4, [0] * 4, [0.5, 1.0, 0.25, 1.0], is_half=True)
    kept = (found > float("-inf")).sum(1)
    assert abs(kept[2].item() - VOCAB / 2) <= 1
    assert abs(kept[0].item() - VOCAB / 4) <= 1
    assert (found[0, : int(kept[0])] == 0).all()


def test_logits_that_are_ruled_out_already_count_for_nothing() -> None:
    logits = _logits(3, is_half=True)
    logits[:, 5:] = float("-inf")
    found, expected = _truncated(logits, [1.0] * 4, [3, 0, 20, 0], [1.0, 1.0, 0.9, 1.0], is_half=True)
    assert torch.equal(found, expected)
