"""Draws a token for each row of logits: argmax(logit / temperature + Gumbel noise), or the argmax where it is 0.

The noise of a vocabulary id is a hash (splitmix64) of the row's key, output position and id, the same as on the CPU
up to float32's rounding. Two kernels: the best of each slice of the vocabulary, then the best of the slices; equal
scores go to the lowest id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SLICE = 4096
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
def _slice_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int32: where a row's parameters are
    keys_ptr,  # [.] int64
    positions_ptr,  # [.] int32
    temperatures_ptr,  # [.] float32
    scores_ptr, ids_ptr,  # [num_rows, num_slices]
    vocab, logits_stride, num_slices, SLICE: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.maximum(tl.load(rows_ptr + row), 0)
    temperature = tl.load(temperatures_ptr + state)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    scores = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=inside, other=float("-inf"))
    scores = scores.to(tl.float32)
    if temperature > 0:
        key = tl.load(keys_ptr + state).to(tl.uint64, bitcast=True)
        row_key = _mixed(key ^ tl.load(positions_ptr + state).to(tl.uint64))
        word = _mixed(row_key + ids.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 12
        low = (word.to(tl.float32) + 0.5) * 2.220446049250313e-16  # of 52 bits
        high = ((4503599627370495 - word).to(tl.float32) + 0.5) * 2.220446049250313e-16  # 1 - low, exact where small
        near = high * (1.0 + high * (0.5 + high * (0.33333334 + high * 0.25)))
        minus_log = tl.where(high < 0.01, near, -tl.log(low))
        scores = scores / temperature - tl.log(minus_log)
    scores = tl.where(inside, scores, float("-inf"))
    best = tl.max(scores, 0)
    first = tl.min(tl.where(scores == best, ids, 2147483647), 0)
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
    tl.store(drawn_ptr + row, tl.min(tl.where(scores == best, ids, 2147483647), 0).to(tl.int64))


def num_slices(vocab_size: int) -> int:
    return -(-vocab_size // SLICE)


def gumbel_argmax(
    logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor,
    temperatures: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, drawn: torch.Tensor,
) -> None:
    """Row i of `logits` [num_rows, vocab] has its parameters at `rows[i]`; a negative row draws whatever is there.

    `scores` float32 and `ids` int32 [at least num_rows, num_slices(vocab)] are scratch; the ids go to `drawn`.
    """
    num_rows, vocab = logits.shape
    slices = num_slices(vocab)
    assert logits.stride(1) == 1 and scores.shape[1] == ids.shape[1] == slices and drawn.dtype == torch.int64
    assert keys.dtype == torch.int64 and positions.dtype == rows.dtype == torch.int32
    _slice_kernel[(num_rows, slices)](
        logits, rows, keys, positions, temperatures, scores, ids, vocab, logits.stride(0), slices, SLICE=SLICE,
        num_warps=4)
    _final_kernel[(num_rows,)](
        scores, ids, drawn, slices, SLICES=max(16, triton.next_power_of_2(slices)), num_warps=1)
