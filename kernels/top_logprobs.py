"""Log-probabilities of the drawn tokens and of the likeliest ones, by the model's own logits.

Each slice of the vocabulary gives its sum of exponents and its few best; one program a row then picks the best of all.
A logit and its id are one 64-bit word whose order is theirs (equal logits: the lower id is larger), so that the next
best is the largest word below the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SLICE = 4096
MAX_TOP = 20
_LEAST = -(1 << 63)


@dataclass(frozen=True, slots=True)
class LogprobScratch:
    """For at most `max_rows` rows."""

    maxes: torch.Tensor  # [max_rows, num_slices] float32
    sums: torch.Tensor  # [max_rows, num_slices] float32: of exponents below the slice's maximum
    best: torch.Tensor  # [max_rows, num_slices, MAX_TOP] int64
    found: torch.Tensor  # [max_rows, 2 * (MAX_TOP + 1)] int32

    @staticmethod
    def make(max_rows: int, vocab_size: int, device: torch.device, slice_size: int = SLICE) -> LogprobScratch:
        slices = -(-vocab_size // slice_size)
        return LogprobScratch(
            torch.empty(max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, dtype=torch.float32, device=device),
            torch.empty(max_rows, slices, MAX_TOP, dtype=torch.int64, device=device),
            torch.zeros(max_rows, 2 * (MAX_TOP + 1), dtype=torch.int32, device=device))


def reference(logits: torch.Tensor, drawn: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`logits` [num_rows, vocab], `drawn` [num_rows] → (ids, log-probabilities), each [num_rows, 1 + num_top].

    The drawn token first, then the likeliest, best first; equal ones by id.
    """
    scores = torch.log_softmax(logits.double(), -1)
    likeliest = torch.sort(-logits.double(), dim=-1, stable=True).indices[:, :num_top]
    ids = torch.cat((drawn[:, None], likeliest), 1)
    return ids, scores.gather(1, ids)


@triton.jit
def _word(x, ids):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (2147483647 - ids).to(tl.int64)


@triton.jit
def _slice_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int32; -1: padding
    wanted_ptr,  # [max_rows] int32: 1 + how many of the likeliest; 0: nothing
    maxes_ptr, sums_ptr,  # [num_rows, num_slices] float32
    best_ptr,  # [num_rows, num_slices, MAX_TOP] int64
    vocab, logits_stride, num_slices, MAX_TOP: tl.constexpr, SLICE: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    wanted = tl.load(wanted_ptr + state)
    if wanted == 0:
        return
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    at = row * num_slices + part
    tl.store(maxes_ptr + at, top)
    tl.store(sums_ptr + at, tl.sum(tl.exp(x - tl.maximum(top, -3.0e38)), 0))
    words = tl.where(inside, _word(x, ids), -9223372036854775808)
    for place in range(0, wanted - 1):
        best = tl.max(words, 0)
        tl.store(best_ptr + at.to(tl.int64) * MAX_TOP + place, best)
        words = tl.where(words == best, -9223372036854775808, words)


@triton.jit
def _final_kernel(
    logits_ptr, rows_ptr, wanted_ptr, maxes_ptr, sums_ptr, best_ptr,  # as in `_slice_kernel`
    drawn_ptr,  # [num_rows] int64
    found_ptr,  # [num_rows, 2 * (MAX_TOP + 1)] int32: ids, then the bits of log-probabilities
    vocab, logits_stride, num_slices, MAX_TOP: tl.constexpr, SLICES: tl.constexpr, PLACES: tl.constexpr,
):
    row = tl.program_id(0)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    wanted = tl.load(wanted_ptr + state)
    if wanted == 0:
        return
    at = tl.arange(0, SLICES)
    exists = at < num_slices
    maxes = tl.load(maxes_ptr + row * num_slices + at, mask=exists, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_slices + at, mask=exists, other=0.0)
    top = tl.max(maxes, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxes - top), 0))
    found = found_ptr + row * (2 * (MAX_TOP + 1))
    drawn = tl.minimum(tl.maximum(tl.load(drawn_ptr + row), 0), vocab - 1)
    logit = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + drawn).to(tl.float32)
    tl.store(found, drawn.to(tl.int32))
    tl.store(found + MAX_TOP + 1, tl.minimum(logit - top - log_sum, 0.0).to(tl.int32, bitcast=True))
    place = tl.arange(0, PLACES)
    is_there = exists[:, None] & (place < wanted - 1)[None, :]
    words = tl.load(best_ptr + (row.to(tl.int64) * num_slices + at)[:, None] * MAX_TOP + place[None, :], mask=is_there,
                    other=-9223372036854775808)
    for index in range(0, wanted - 1):
        best = tl.max(tl.max(words, 1), 0)
        words = tl.where(words == best, -9223372036854775808, words)
        key = (best >> 32).to(tl.int32)
        logit = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(found + 1 + index, 2147483647 - best.to(tl.int32))
        tl.store(found + MAX_TOP + 2 + index, tl.minimum(logit - top - log_sum, 0.0).to(tl.int32, bitcast=True))


def top_logprobs(
    logits: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor, drawn: torch.Tensor, scratch: LogprobScratch,
    slice_size: int = SLICE,
) -> torch.Tensor:
    """[num_rows, 2 * (MAX_TOP + 1)] int32 of `scratch`: ids, then the bits of float32 log-probabilities.

    Place 0 is the drawn token, then come the likeliest. `wanted[rows[i]]` is 1 + how many of these row i wants, at
    most MAX_TOP and the vocabulary; 0 for a row that is left as it was.
    """
    num_rows, vocab = logits.shape
    num_slices = -(-vocab // slice_size)
    assert logits.stride(1) == 1 and scratch.maxes.shape[1] == num_slices and drawn.dtype == torch.int64
    _slice_kernel[(num_rows, num_slices)](
        logits, rows, wanted, scratch.maxes, scratch.sums, scratch.best, vocab, logits.stride(0), num_slices,
        MAX_TOP=MAX_TOP, SLICE=slice_size, num_warps=4)
    _final_kernel[(num_rows,)](
        logits, rows, wanted, scratch.maxes, scratch.sums, scratch.best, drawn, scratch.found, vocab, logits.stride(0),
        num_slices, MAX_TOP=MAX_TOP, SLICES=triton.next_power_of_2(num_slices),
        PLACES=triton.next_power_of_2(MAX_TOP), num_warps=4)
    return scratch.found[:num_rows]
