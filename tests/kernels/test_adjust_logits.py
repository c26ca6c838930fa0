"""What rules tokens out or moves their logits, against plain torch and in the order of the CPU's sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from kernels.adjust_logits import RowChanges, adjust_logits, reference
from kernels.token_counts import reference as history_of_tokens
from tests.kernel_mode import DEVICE, DTYPES, ON_GPU

VOCAB, SLICE = (151936, 4096) if ON_GPU else (700, 256)
MASK_WORDS = -(-VOCAB // 32)


@dataclass
class Row:
    """One row's wishes; the default changes nothing."""

    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    limit: float = 0.0
    min_tokens: int = 0
    history: torch.Tensor | None = None
    allowed: list[int] | None = None
    listed: dict[int, float] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    mask: list[int] | None = None


def _bits(ids: list[int] | None) -> torch.Tensor:
    bits = np.ones(MASK_WORDS * 32, np.uint8) if ids is None else np.zeros(MASK_WORDS * 32, np.uint8)
    if ids is not None:
        bits[ids] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))


def _changes(rows: list[Row]) -> RowChanges:
    def floats(name: str) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], device=DEVICE)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    listed = torch.zeros(len(rows), 300, 2, dtype=torch.int32)
    for row, wish in enumerate(rows):
        for place, (token_id, bias) in enumerate((dict.fromkeys(wish.ends, 0.0) | wish.listed).items()):
            listed[row, place, 0] = -1 - token_id if token_id in wish.ends else token_id
            listed[row, place, 1] = torch.tensor(bias).view(torch.int32)
    histories = [row.history for row in rows if row.history is not None]
    number = iter(range(1, len(rows) + 1))
    return RowChanges(
        floats("repetition"), floats("frequency"), floats("presence"), floats("limit"),
        ints([row.min_tokens for row in rows]), ints([0 if row.history is None else next(number) for row in rows]),
        torch.stack(histories).to(DEVICE) if histories else torch.zeros(1, VOCAB, dtype=torch.int32, device=DEVICE),
        torch.stack([_bits(row.allowed) for row in rows]).to(DEVICE),
        ints([len(row.listed.keys() | set(row.ends)) for row in rows]), listed.to(DEVICE))


def _check(rows: list[Row], logits: torch.Tensor, positions: list[int], temperatures: list[float]) -> torch.Tensor:
    """Rows in reverse order, with padding between; returns what was found, in the order of `rows`."""
    changes, num = _changes(rows), len(rows)
    order = torch.tensor([*reversed(range(num)), -1], dtype=torch.int32, device=DEVICE)
    masks = torch.stack([_bits(row.mask) for row in rows]).to(DEVICE)
    has_masks = any(row.mask is not None for row in rows)
    mask_rows = torch.tensor(
        [i if rows[i].mask is not None else -1 for i in reversed(range(num))] + [-1], dtype=torch.int32, device=DEVICE)
    where = torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    heat = torch.tensor(temperatures, device=DEVICE)
    given = torch.cat((logits.flip(0), logits[:1]))
    kept, maxes = given.clone(), torch.full((2, num + 1, -(-VOCAB // SLICE)), float("nan"), device=DEVICE)
    found = torch.empty(num + 1, VOCAB, device=DEVICE)
    adjust_logits(
        given, order, where + 1, heat, changes, masks, mask_rows if has_masks else None, maxes, found, behind=1,
        has_lists=any(row.listed or row.ends for row in rows),
        can_cut=any(row.limit or row.min_tokens or row.allowed or row.mask for row in rows), slice_size=SLICE)
    expected = reference(given, order, where, heat, changes, masks, mask_rows if has_masks else None)
    assert torch.equal(given, kept)
    is_finite = expected[:-1] > float("-inf")
    assert torch.equal(found[:-1] > float("-inf"), is_finite)
    torch.testing.assert_close(found[:-1][is_finite], expected[:-1][is_finite], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(maxes[1, :-1].amax(1), expected[:-1].amax(1), rtol=1e-6, atol=1e-5)
    return found[:-1].flip(0)


def _history() -> torch.Tensor:
    return history_of_tokens(torch.randint(0, VOCAB, (200,)), 120, VOCAB)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_alone_and_together(dtype: torch.dtype) -> None:
    rows = [
        Row(), Row(repetition=1.3, history=_history()), Row(frequency=0.7, presence=-0.4, history=_history()),
        Row(allowed=[3, 77, 600], mask=[77, 600, 5]), Row(listed={5: 90.0, 699: -3.0}, ends=[5, 12], min_tokens=4),
        Row(listed=dict.fromkeys(range(40, 240), 2.5), repetition=0.8, presence=1.0, history=_history(),
            mask=list(range(30, 500)), ends=[33], min_tokens=9, limit=2.0)]
    logits = (torch.randn(len(rows), VOCAB, device=DEVICE) * 3).to(dtype)
    found = _check(rows, logits, [3] * len(rows), [1.0, 0.5, 1.0, 0.0, 1.0, 0.7])
    assert torch.equal(found[0], logits[0].float())
    assert (found[3] > float("-inf")).nonzero().flatten().tolist() == [77, 600]


def test_end_ids_are_free_once_there_are_enough_tokens() -> None:
    rows = [Row(ends=[5, 12], min_tokens=4), Row(ends=[5, 12], min_tokens=4, listed={5: 1.0})]
    found = _check(rows, torch.zeros(2, VOCAB, device=DEVICE), [4, 3], [1.0, 1.0])
    assert found[0, [5, 12]].tolist() == [0.0, 0.0]
    assert found[1, [5, 12]].tolist() == [float("-inf")] * 2


def test_where_nothing_is_left_the_mask_alone_holds_or_else_the_allowed_ids() -> None:
    rows = [Row(mask=[5, 6], allowed=[9]), Row(allowed=[9], ends=[9], min_tokens=9, listed={9: -50.0}),
            Row(mask=[7], ends=[7], min_tokens=9)]
    logits = torch.randn(3, VOCAB, device=DEVICE)
    found = _check(rows, logits, [0, 0, 0], [1.0] * 3)
    left = [(row > float("-inf")).nonzero().flatten().tolist() for row in found]
    assert left == [[5, 6], [9], [7]]
    assert found[1, 9] == logits[1, 9]


def test_min_p_leaves_what_is_likely_enough() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32, device=DEVICE).repeat(2, 1) * 0.01
    found = _check([Row(limit=1.0), Row(limit=1.0)], logits, [0, 0], [1.0, 0.5])
    kept = (found > float("-inf")).sum(1).tolist()
    assert kept[0] in (100, 101)
    assert kept[1] in (50, 51)
