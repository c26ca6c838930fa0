"""top_k and top_p without a sort: logits outside become -infinity.

The least logit that stays is searched for, as a 32-bit key in the order of floats: each pass measures, at 16 pivots
between the bounds so far, how many logits (or how much probability) lie at or above, and keeps one of the 17 parts. So
8 passes find it exactly, 4 where all logits are bfloat16 numbers. Then, of logits equal to it, only the lowest ids
stay that are still needed. Partial sums are added in a fixed order, so a row's result never depends on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SLICE = 4096
PIVOTS = 16
_CHUNK = 512  # logits of a slice that are held against all pivots together
_PASSES = 8  # 17 ** 8 > 2 ** 32
_HALF_PASSES = 4  # 17 ** 4 > 2 ** 16


@dataclass(frozen=True, slots=True)
class TruncateScratch:
    """For at most `max_rows` rows; also what the kernels before and after need a number of each slice for."""

    maxes: torch.Tensor  # [2, max_rows, num_slices] float32, see `adjust_logits`
    brackets: torch.Tensor  # [_PASSES + 1, max_rows, 2] int64
    sums: torch.Tensor  # [2, max_rows, num_slices, PIVOTS] float32
    totals: torch.Tensor  # [max_rows, num_slices] float32
    ties: torch.Tensor  # [max_rows, num_slices] int32
    above: torch.Tensor  # [max_rows, num_slices] float32
    slice_scores: torch.Tensor  # [max_rows, num_slices] float32, see `gumbel_argmax`
    slice_ids: torch.Tensor  # [max_rows, num_slices] int32

    @staticmethod
    def make(max_rows: int, vocab_size: int, device: torch.device, slice_size: int = SLICE) -> TruncateScratch:
        slices = -(-vocab_size // slice_size)
        return TruncateScratch(
            torch.empty(2, max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(_PASSES + 1, max_rows, 2, dtype=torch.int64, device=device),
            torch.empty(2, max_rows, slices, PIVOTS, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, dtype=torch.int32, device=device),
            torch.empty(max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, dtype=torch.int32, device=device))


def reference(
    logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor
) -> torch.Tensor:
    """`logits` [num_rows, vocab] float32, parameters at `rows[i]` → what stays, -infinity elsewhere.

    First the `top_k` largest (0: all), then of these the fewest largest whose probabilities reach `top_p`; of equal
    ones the lower ids.
    """
    kept = logits.clone()
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        order = torch.sort(-logits[i].double(), stable=True).indices
        if 0 < int(top_ks[row]) < len(order):
            kept[i, order[int(top_ks[row]) :]] = float("-inf")
        if top_ps[row] < 1.0:
            weights = torch.softmax(kept[i].double() / temperatures[row].double(), 0)[order]
            before = torch.cumsum(weights, 0) - weights
            kept[i, order[before >= top_ps[row].double()]] = float("-inf")
    return kept


@triton.jit
def _key(x, HALF: tl.constexpr):
    """Whole numbers in the order of floats: of 32 bits, or of the upper 16 where the others say nothing."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if HALF:
        key = key >> 16
    return key


@triton.jit
def _logit(key, HALF: tl.constexpr):
    """The float of a key."""
    if HALF:
        key = (key << 16) | tl.where(key < 0, 65535, 0)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_off(limit, BY_MASS: tl.constexpr):
    if BY_MASS:
        is_off = limit >= 1.0
    else:
        is_off = limit <= 0
    return is_off


@triton.jit
def _target(limit, totals_ptr, row, num_slices, BY_MASS: tl.constexpr, SLICES: tl.constexpr):
    target = limit.to(tl.float32)
    if BY_MASS:
        at = tl.arange(0, SLICES)
        target = target * tl.sum(tl.load(totals_ptr + row * num_slices + at, mask=at < num_slices, other=0.0), 0)
    return target


@triton.jit
def _top(maxes_ptr, row, num_slices, SLICES: tl.constexpr):
    at = tl.arange(0, SLICES)
    return tl.max(tl.load(maxes_ptr + row * num_slices + at, mask=at < num_slices, other=float("-inf")), 0)


@triton.jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    return low + (high - low) * (tl.arange(0, PIVOTS) + 1) // (PIVOTS + 1)


@triton.jit
def _narrowed(
    bracket_ptr, sums_ptr, target, row, num_slices, PIVOTS: tl.constexpr, SLICES: tl.constexpr,
):
    """The bounds after a pass: [low, high) holds the largest key at or above which there is `target`."""
    low, high = tl.load(bracket_ptr + row * 2), tl.load(bracket_ptr + row * 2 + 1)
    at, p = tl.arange(0, SLICES), tl.arange(0, PIVOTS)
    parts = sums_ptr + (row * num_slices + at)[:, None] * PIVOTS + p[None, :]
    reached = tl.sum(tl.load(parts, mask=(at < num_slices)[:, None], other=0.0), 0) >= target
    pivots = _pivots(low, high, PIVOTS)
    return tl.max(tl.where(reached, pivots, low), 0), tl.min(tl.where(reached, high, pivots), 0)


@triton.jit
def _pass_kernel(
    logits_ptr,  # [num_rows, vocab] float32
    rows_ptr,  # [num_rows] int32; -1: padding
    limits_ptr,  # [max_rows]: top_k int32, 0 is off; or top_p float32, 1 is off
    temperatures_ptr,  # [max_rows] float32
    maxes_ptr,  # [num_rows, num_slices] float32
    before_ptr, bracket_ptr,  # [num_rows, 2] int64, of the pass before and of this one
    sums_before_ptr, sums_ptr,  # [num_rows, num_slices, PIVOTS] float32
    totals_ptr,  # [num_rows, num_slices] float32
    vocab, num_slices, BY_MASS: tl.constexpr, HALF: tl.constexpr, FIRST: tl.constexpr, PIVOTS: tl.constexpr,
    SLICE: tl.constexpr, CHUNK: tl.constexpr, SLICES: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    limit = tl.load(limits_ptr + state)
    if _is_off(limit, BY_MASS):
        return
    if FIRST:
        high = tl.full([], 32768 if HALF else 2147483648, tl.int64)
        low = -high
    else:
        target = _target(limit, totals_ptr, row, num_slices, BY_MASS, SLICES)
        low, high = _narrowed(before_ptr, sums_before_ptr, target, row, num_slices, PIVOTS, SLICES)
    if part == 0:
        tl.store(bracket_ptr + row * 2, low)
        tl.store(bracket_ptr + row * 2 + 1, high)
    pivots = _pivots(low, high, PIVOTS).to(tl.int32)[:, None]
    temperature = tl.load(temperatures_ptr + state)
    top = _top(maxes_ptr, row, num_slices, SLICES)
    sums = tl.zeros([PIVOTS, CHUNK], tl.float32)
    whole = tl.zeros([CHUNK], tl.float32)
    for first in range(0, SLICE, CHUNK):
        ids = part * SLICE + first + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        if BY_MASS:
            value = tl.exp((x - top) / temperature)
        else:
            value = tl.where(x > float("-inf"), 1.0, 0.0)
        sums += tl.where(_key(x, HALF)[None, :] >= pivots, value[None, :], 0.0)
        whole += value
    tl.store(sums_ptr + (row * num_slices + part) * PIVOTS + tl.arange(0, PIVOTS), tl.sum(sums, 1))
    if FIRST:
        tl.store(totals_ptr + row * num_slices + part, tl.sum(whole, 0))


@triton.jit
def _ties_kernel(
    logits_ptr, rows_ptr, limits_ptr, temperatures_ptr, maxes_ptr, before_ptr, bracket_ptr, sums_before_ptr,
    totals_ptr,  # as in `_pass_kernel`
    ties_ptr,  # [num_rows, num_slices] int32: logits equal to the least that stays
    above_ptr,  # [num_rows, num_slices] float32: what lies above it
    vocab, num_slices, BY_MASS: tl.constexpr, HALF: tl.constexpr, PIVOTS: tl.constexpr, SLICE: tl.constexpr,
    SLICES: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    limit = tl.load(limits_ptr + state)
    if _is_off(limit, BY_MASS):
        return
    target = _target(limit, totals_ptr, row, num_slices, BY_MASS, SLICES)
    low, _ = _narrowed(before_ptr, sums_before_ptr, target, row, num_slices, PIVOTS, SLICES)
    if part == 0:
        tl.store(bracket_ptr + row * 2, low)
    ids = part * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits_ptr + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    key, least = _key(x, HALF), low.to(tl.int32)
    is_finite = x > float("-inf")
    if BY_MASS:
        value = tl.exp((x - _top(maxes_ptr, row, num_slices, SLICES)) / tl.load(temperatures_ptr + state))
    else:
        value = tl.where(is_finite, 1.0, 0.0)
    tl.store(ties_ptr + row * num_slices + part, tl.sum((is_finite & (key == least)).to(tl.int32), 0))
    tl.store(above_ptr + row * num_slices + part, tl.sum(tl.where(key > least, value, 0.0), 0))


@triton.jit
def _cut_kernel(
    logits_ptr, rows_ptr, limits_ptr, temperatures_ptr, maxes_ptr,  # as in `_pass_kernel`; logits are changed
    bracket_ptr,  # [num_rows, 2] int64: the key of the least that stays first
    totals_ptr, ties_ptr, above_ptr,  # as in `_ties_kernel`
    vocab, num_slices, BY_MASS: tl.constexpr, HALF: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    limit = tl.load(limits_ptr + state)
    if _is_off(limit, BY_MASS):
        return
    at = tl.arange(0, SLICES)
    above = tl.sum(tl.load(above_ptr + row * num_slices + at, mask=at < num_slices, other=0.0), 0)
    ties = tl.load(ties_ptr + row * num_slices + at, mask=at < num_slices, other=0)
    ties_before = tl.sum(tl.where(at < part, ties, 0), 0)
    least = tl.load(bracket_ptr + row * 2).to(tl.int32)
    room = _target(limit, totals_ptr, row, num_slices, BY_MASS, SLICES) - above
    if BY_MASS:
        top = _top(maxes_ptr, row, num_slices, SLICES)
        room = room / tl.exp((_logit(least, HALF) - top) / tl.load(temperatures_ptr + state))
    room = tl.maximum(tl.ceil(tl.minimum(room, 1.0e9)), 1.0).to(tl.int32)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    out = logits_ptr + row.to(tl.int64) * vocab + ids
    x = tl.load(out, mask=inside, other=float("-inf"))
    key = _key(x, HALF)
    is_tie = key == least
    rank = ties_before + tl.cumsum(is_tie.to(tl.int32), 0)  # from 1
    goes = (key < least) | (is_tie & (rank > room))
    tl.store(out, tl.full([SLICE], float("-inf"), tl.float32), mask=inside & goes)


def truncate_logits(
    logits: torch.Tensor, rows: torch.Tensor, temperatures: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor,
    scratch: TruncateScratch, *, by_count: bool, by_mass: bool, is_half: bool, slice_size: int = SLICE,
) -> None:
    """As `reference`, in place. `scratch.maxes[1]` holds the largest of each slice (see `adjust_logits`).

    `by_count`, `by_mass`: some row has a top_k, a top_p; such rows have a temperature above 0. `is_half`: every logit
    is a bfloat16 number or -infinity. Probabilities are summed in float32: at the edge of a nucleus a token may be in
    or out that is out or in by exact sums.
    """
    num_rows, vocab = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    for is_wanted, limits, is_mass in ((by_count, top_ks, False), (by_mass, top_ps, True)):
        if is_wanted:
            _search(logits, rows, limits, temperatures, scratch, num_rows, vocab, is_mass, is_half, slice_size)


def _search(
    logits: torch.Tensor, rows: torch.Tensor, limits: torch.Tensor, temperatures: torch.Tensor,
    scratch: TruncateScratch, num_rows: int, vocab: int, by_mass: bool, is_half: bool, slice_size: int,
) -> None:
    num_slices = -(-vocab // slice_size)
    assert scratch.ties.shape[1] == num_slices and num_rows <= len(scratch.ties)
    slices = max(16, triton.next_power_of_2(num_slices))
    passes = _HALF_PASSES if is_half else _PASSES
    grid = (num_rows, num_slices)
    brackets, sums = scratch.brackets, scratch.sums
    row_args = logits, rows, limits, temperatures, scratch.maxes[1]
    for turn in range(passes):
        _pass_kernel[grid](
            *row_args, brackets[turn - 1], brackets[turn], sums[(turn - 1) % 2], sums[turn % 2], scratch.totals, vocab,
            num_slices, BY_MASS=by_mass, HALF=is_half, FIRST=turn == 0, PIVOTS=PIVOTS, SLICE=slice_size,
            CHUNK=min(_CHUNK, slice_size), SLICES=slices, num_warps=4)
    _ties_kernel[grid](
        *row_args, brackets[passes - 1], brackets[_PASSES], sums[(passes - 1) % 2], scratch.totals, scratch.ties,
        scratch.above, vocab, num_slices, BY_MASS=by_mass, HALF=is_half, PIVOTS=PIVOTS, SLICE=slice_size,
        SLICES=slices, num_warps=4)
    _cut_kernel[grid](
        *row_args, brackets[_PASSES], scratch.totals, scratch.ties, scratch.above, vocab, num_slices, BY_MASS=by_mass,
        HALF=is_half, SLICE=slice_size, SLICES=slices, num_warps=4)
