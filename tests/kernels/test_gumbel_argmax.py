"""Draws by temperature alone: the same tokens as the sampler on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampling.gumbel_draw import draw_rows
from engine.sampling.noise import row_key
from kernels.gumbel_argmax import gumbel_argmax, num_slices, reference
from tests.kernel_mode import DEVICE, DTYPES, ON_GPU

VOCAB, SLICE = (151936, 4096) if ON_GPU else (1003, 256)


def _draw(
    logits: torch.Tensor, keys: list[int], positions: list[int], temperatures: list[float], *, race: bool,
    rows: list[int] | None = None, behind: int = 0,
) -> list[int]:
    num = len(logits)
    slices = num_slices(logits.shape[1], SLICE)
    scores = torch.full((num, slices), float("nan"), device=DEVICE)
    ids = torch.full((num, slices), -9, dtype=torch.int32, device=DEVICE)
    drawn = torch.full((num,), -9, device=DEVICE)
    words = torch.from_numpy(np.array(keys, np.uint64).view(np.int64)).to(DEVICE)
    gumbel_argmax(
        logits, torch.tensor(rows or range(num), dtype=torch.int32, device=DEVICE), words,
        torch.tensor(positions, dtype=torch.int32, device=DEVICE), torch.tensor(temperatures, device=DEVICE), scores,
        ids, drawn, behind=behind, race=race, slice_size=SLICE)
    return drawn.tolist()


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_the_cpu_samplers(dtype: torch.dtype, race: bool) -> None:
    num = 64 if ON_GPU else 4
    logits = (torch.randn(num, VOCAB, device=DEVICE) * 3).to(dtype)
    keys = [(0x9E3779B97F4A7C15 * (i + 1)) % 2**64 for i in range(num)]
    temperatures = [(0.3, 1.0, 2.0, 0.01)[i % 4] for i in range(num)]
    found = _draw(logits, keys, list(range(num)), temperatures, race=race)
    host = logits.float().cpu().numpy()
    expected = draw_rows(host, host.max(1), np.array(temperatures),
                         np.array([row_key(key, i) for i, key in enumerate(keys)], np.uint64))
    assert found == expected.tolist()


@pytest.mark.parametrize("race", [False, True])
def test_flat_logits_draw_the_references_tokens(race: bool) -> None:
    logits, keys = torch.zeros(3, 1003, device=DEVICE), [1, 2**63 + 5, 2**64 - 1]
    words = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
    expected = reference(logits.cpu(), words, torch.tensor([0, 7, 8]), torch.ones(3))
    assert _draw(logits, keys, [0, 7, 8], [1.0] * 3, race=race) == expected.tolist()
    assert _draw(logits, keys, [1, 8, 9], [1.0] * 3, race=race, behind=1) == expected.tolist()


def test_without_temperature_the_lowest_of_the_likeliest_is_drawn() -> None:
    logits = torch.randn(2, VOCAB, device=DEVICE)
    logits[0, [700, 300, 999]] = 50.0
    logits[1, VOCAB - 1] = 50.0
    assert _draw(logits, [1, 1], [0, 0], [0.0, 0.0], race=False) == [300, VOCAB - 1]


@pytest.mark.parametrize("race", [False, True])
def test_ids_at_minus_infinity_are_never_drawn(race: bool) -> None:
    logits = torch.full((2, VOCAB), float("-inf"), device=DEVICE)
    logits[:, 5] = torch.tensor([-1000.0, -90.0], device=DEVICE)
    assert _draw(logits, [3, 4], [0, 0], [1.0, 0.01], race=race) == [5, 5]


@pytest.mark.parametrize("race", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_makes_the_token_minus_one(bad: float, temperature: float, race: bool) -> None:
    logits = torch.zeros(2, 300, device=DEVICE)
    logits[0, 200] = bad
    assert (_draw(logits, [1, 1], [0, 0], [temperature] * 2, race=race)[0]) == -1


def test_parameters_are_those_of_the_named_rows() -> None:
    logits = torch.randn(2, 1003, device=DEVICE)
    keys, temperatures = [11, 12, 13], [1.0, 0.0, 0.7]
    swapped = _draw(logits, keys, [4, 5, 6], temperatures, race=False, rows=[2, 0])
    assert swapped == _draw(logits, [13, 11], [6, 4], [0.7, 1.0], race=False)
