"""Draws a token for each row of logits: argmax(logit / temperature + Gumbel noise), or the argmax where it is 0.

The noise of a vocabulary id is a hash (splitmix64) of the row's key, output position and id, the same as on the CPU
up to float32's rounding. Two kernels: the best of each slice of the vocabulary, then the best of the slices; equal
scores go to the lowest id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SLICE = 2048
RACE = True  # whether a slice's best is found as the first of exponential arrivals, by one logarithm an id, not two
_MASK = (1 << 64) - 1
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def reference(
    logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """`logits` [rows, vocab], `keys` [rows] int64 (bits of an unsigned word), `positions` [rows] → ids [rows] int64."""
    drawn = []
    for row in range(len(logits)):
        scores = logits[row].double()
        if temperatures[row] > 0:
            scores = scores / temperatures[row].double() + _noise(int(keys[row]), int(positions[row]), len(scores))
        drawn.append(int(torch.nonzero(scores == scores.max())[0]))
    return torch.tensor(drawn, device=logits.device)


def _noise(key: int, position: int, vocab_size: int) -> torch.Tensor:
    row_key = _mix((key & _MASK) ^ position)
    words = [_mix(row_key + i * _STEP) for i in range(vocab_size)]
    uniform = torch.tensor([((word >> 12) + 0.5) * 2.0**-52 for word in words], dtype=torch.float64)
    return -torch.log(-torch.log(uniform))


def _mix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)


@triton.jit
def _mixed(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _gumbel(word):
    """Standard Gumbel noise of hashed words."""
    bits = word >> 12
    low = (bits.to(tl.float32) + 0.5) * 2.220446049250313e-16  # of 52 bits
    high = ((4503599627370495 - bits).to(tl.float32) + 0.5) * 2.220446049250313e-16  # 1 - low, exact where small
    near = high * (1.0 + high * (0.5 + high * (0.33333334 + high * 0.25)))
    return -tl.log(tl.where(high < 0.01, near, -tl.log(low)))


@triton.jit
def _exponential(word):
    """-log of the same uniform number, with half the conversions: of it or of 1 minus it, whichever is smaller."""
    is_high = (word >> 63) != 0
    bits = tl.where(is_high, word ^ 0xFFFFFFFFFFFFFFFF, word) >> 12
    upper, lower = (bits >> 20).to(tl.int32).to(tl.float32), (bits & 0xFFFFF).to(tl.int32).to(tl.float32)
    small = upper * 2.3283064365386963e-10 + (lower + 0.5) * 2.220446049250313e-16
    near = small * (1.0 + small * (0.5 + small * (0.33333334 + small * 0.25)))
    return tl.where(is_high & (small < 0.01), near, -tl.log(tl.where(is_high, 1.0 - small, small)))


@triton.jit
def _slice_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int32: where a row's parameters are
    keys_ptr,  # [.] int64
    positions_ptr,  # [.] int32
    temperatures_ptr,  # [.] float32
    scores_ptr, ids_ptr,  # [num_rows, num_slices]
    vocab, logits_stride, num_slices, behind, SLICE: tl.constexpr, RACE: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.maximum(tl.load(rows_ptr + row), 0)
    temperature = tl.load(temperatures_ptr + state)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # not a number: no draw, see `_final_kernel`
    if temperature > 0:
        key = tl.load(keys_ptr + state).to(tl.uint64, bitcast=True)
        row_key = _mixed(key ^ (tl.load(positions_ptr + state) - behind).to(tl.uint64))
        word = _mixed(row_key + ids.to(tl.uint64) * 0x9E3779B97F4A7C15)
        if RACE:
            top = tl.minimum(tl.maximum(tl.max(x, 0), -3.0e38), 3.0e38)
            arrivals = _exponential(word) * tl.exp2((top - x) * (1.4426950408889634 / temperature))
            first_arrival = tl.min(tl.where(x > float("-inf"), arrivals, float("inf")), 0)
            first = tl.min(tl.where(inside & (arrivals == first_arrival), ids, 2147483647), 0)
            best = tl.where(tl.max(x, 0) < float("inf"), top / temperature - tl.log(first_arrival), float("inf"))
        else:
            scores = tl.where(inside, x / temperature + _gumbel(word), float("-inf"))
            best = tl.max(scores, 0)
            first = tl.min(tl.where(inside & (scores == best), ids, 2147483647), 0)
    else:
        best = tl.max(x, 0)
        first = tl.min(tl.where(inside & (x == best), ids, 2147483647), 0)
    tl.store(scores_ptr + row * num_slices + part, best)
    tl.store(ids_ptr + row * num_slices + part, first)


@triton.jit
def _final_kernel(
    scores_ptr, ids_ptr,  # [num_rows, num_slices]
    drawn_ptr,  # [num_rows] int64
    num_slices, SLICES: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.arange(0, SLICES)
    scores = tl.load(scores_ptr + row * num_slices + part, mask=part < num_slices, other=float("-inf"))
    ids = tl.load(ids_ptr + row * num_slices + part, mask=part < num_slices, other=2147483647)
    best = tl.max(scores, 0)
    drawn = tl.min(tl.where(scores == best, ids, 2147483647), 0)
    tl.store(drawn_ptr + row, tl.where(best < float("inf"), drawn, -1).to(tl.int64))


def num_slices(vocab_size: int, slice_size: int = SLICE) -> int:
    return -(-vocab_size // slice_size)


def gumbel_argmax(
    logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    temperatures: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, drawn: torch.Tensor, behind: int = 0,
    race: bool = RACE, slice_size: int = SLICE,
) -> None:
    """Row i of `logits` [num_rows, vocab] has its parameters at `rows[i]`; a negative row draws whatever is there.

    `scores` float32 and `ids` int32 [at least num_rows, num_slices(vocab)] are scratch; the ids go to `drawn`: -1 for
    a row with an infinite logit or one that is not a number. `behind` is taken from `positions`. Temperatures are 0
    or large enough that logits divided by them are finite.
    """
    num_rows, vocab = logits.shape
    slices = num_slices(vocab, slice_size)
    assert logits.stride(1) == 1 and scores.shape[1] == ids.shape[1] == slices and drawn.dtype == torch.int64
    assert keys.dtype == torch.int64 and positions.dtype == rows.dtype == torch.int32
    _slice_kernel[(num_rows, slices)](
        logits, rows, keys, positions, temperatures, scores, ids, vocab, logits.stride(0), slices, behind,
        SLICE=slice_size, RACE=race, num_warps=4)
    _final_kernel[(num_rows,)](
        scores, ids, drawn, slices, SLICES=max(16, triton.next_power_of_2(slices)), num_warps=1)
