"""What rules tokens out or moves their logits before a draw: masks, allowed ids, end ids, biases, penalties, min_p.

For each row, in this order: ids that its mask or its allowed ids leave out, and end ids while it has fewer than
`min_tokens` outputs, become -infinity; biases are added; then repetition (CTRL, Keskar et al. 2019), frequency and
presence penalties (OpenAI API). Where nothing is left, its mask alone holds, or without one its allowed ids. Last,
min_p: what is less likely than a share of the likeliest becomes -infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SLICE = 4096
_LISTED = 128  # entries of a list that are worked on together


@dataclass(frozen=True, slots=True)
class RowChanges:
    """One entry, or row, for each row of state."""

    repetitions: torch.Tensor  # [max_rows] float32, 1: off
    frequencies: torch.Tensor  # [max_rows] float32
    presences: torch.Tensor  # [max_rows] float32
    limits: torch.Tensor  # [max_rows] float32: -log(min_p), 0: off
    min_tokens: torch.Tensor  # [max_rows] int32
    history_of: torch.Tensor  # [max_rows] int32: 1 + the row's history, 0: none
    histories: torch.Tensor  # [num_histories, vocab] int32: twice the number among outputs, plus 1 if in the prompt
    allowed: torch.Tensor  # [max_rows, ceil(vocab / 32)] int32 of bits, all ones where all are allowed
    num_listed: torch.Tensor  # [max_rows] int32
    listed: torch.Tensor  # [max_rows, max_listed, 2] int32: id, or -1 - id of an end id; the bits of its bias


def reference(
    logits: torch.Tensor, rows: torch.Tensor, output_positions: torch.Tensor, temperatures: torch.Tensor,
    changes: RowChanges, masks: torch.Tensor, mask_rows: torch.Tensor | None,
) -> torch.Tensor:
    """`logits` [num_rows, vocab] → float32. `masks` [., ceil(vocab / 32)] int32, `mask_rows` [num_rows], -1: free."""
    adjusted = logits.float().clone()
    for i, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        x = adjusted[i]
        raw = x.clone()
        allowed = _bits(changes.allowed[row], len(x))
        mask = None if mask_rows is None or mask_rows[i] < 0 else _bits(masks[mask_rows[i]], len(x))
        x[~allowed] = float("-inf")
        if mask is not None:
            x[~mask] = float("-inf")
        listed = changes.listed[row, : changes.num_listed[row]]
        for word, bias in zip(listed[:, 0].tolist(), listed[:, 1].contiguous().view(torch.float32), strict=True):
            if word < 0 and output_positions[row] < changes.min_tokens[row]:
                x[-1 - word] = float("-inf")
            x[word if word >= 0 else -1 - word] += bias
        if changes.history_of[row] > 0:
            _penalize(x, changes, row)
        if x.max() == float("-inf"):
            x[:] = raw
            x[~(allowed if mask is None else mask)] = float("-inf")
        if changes.limits[row] > 0:
            x[(x - x.max()) / temperatures[row] < -changes.limits[row]] = float("-inf")
    return adjusted


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    places = torch.arange(count, device=words.device)
    return (words[places // 32] >> (places % 32) & 1).bool()


def _penalize(x: torch.Tensor, changes: RowChanges, row: int) -> None:
    words = changes.histories[changes.history_of[row] - 1]
    counts, penalty = (words >> 1).float(), changes.repetitions[row]
    repeated = torch.where(x > 0, x / penalty, x * penalty)
    x[:] = torch.where(words != 0, repeated, x)
    x -= changes.frequencies[row] * counts
    x -= changes.presences[row] * (counts > 0)


@triton.jit
def _kept(x, words_ptr, ids, inside):
    """-infinity where the id's bit is not set."""
    word = tl.load(words_ptr + ids // 32, mask=inside, other=0)
    return tl.where((word >> (ids % 32)) & 1 != 0, x, float("-inf"))


@triton.jit
def _changed(
    x, ids, inside, row, state, vocab, mask_words,
    masks_ptr, mask_rows_ptr, allowed_ptr, history_of_ptr, histories_ptr, repetitions_ptr, frequencies_ptr,
    presences_ptr, bias, HAS_MASKS: tl.constexpr,
):
    """All but end ids and min_p, of logits `x` of `ids`."""
    x = _kept(x, allowed_ptr + state.to(tl.int64) * mask_words, ids, inside)
    if HAS_MASKS:
        mask = tl.load(mask_rows_ptr + row)
        if mask >= 0:
            x = _kept(x, masks_ptr + mask.to(tl.int64) * mask_words, ids, inside)
    x = x + bias
    history = tl.load(history_of_ptr + state) - 1
    if history >= 0:
        word = tl.load(histories_ptr + history.to(tl.int64) * vocab + ids, mask=inside, other=0)
        counts = (word >> 1).to(tl.float32)
        repetition = tl.load(repetitions_ptr + state)
        repeated = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(word != 0, repeated, x)
        x = x - tl.load(frequencies_ptr + state) * counts
        x = x - tl.where(counts > 0, tl.load(presences_ptr + state), 0.0)
    return x


@triton.jit
def _slice_kernel(
    logits_ptr,  # [num_rows, vocab]
    rows_ptr,  # [num_rows] int32; -1: padding, left as it is
    masks_ptr,  # [., mask_words] int32
    mask_rows_ptr,  # [num_rows] int32, -1: none
    allowed_ptr,  # [max_rows, mask_words] int32
    history_of_ptr,  # [max_rows] int32
    histories_ptr,  # [num_histories, vocab] int32
    repetitions_ptr, frequencies_ptr, presences_ptr,  # [max_rows] float32
    out_ptr,  # [num_rows, vocab] float32
    maxes_ptr,  # [num_rows, num_slices] float32: the largest of each slice of `out`
    vocab, logits_stride, mask_words, num_slices, HAS_MASKS: tl.constexpr, SLICE: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = _changed(
        x, ids, inside, row, state, vocab, mask_words, masks_ptr, mask_rows_ptr, allowed_ptr, history_of_ptr,
        histories_ptr, repetitions_ptr, frequencies_ptr, presences_ptr, 0.0, HAS_MASKS)
    tl.store(out_ptr + row.to(tl.int64) * vocab + ids, x, mask=inside)
    tl.store(maxes_ptr + row * num_slices + part, tl.max(x, 0))


@triton.jit
def _listed_kernel(
    logits_ptr, rows_ptr, masks_ptr, mask_rows_ptr, allowed_ptr, history_of_ptr, histories_ptr,
    repetitions_ptr, frequencies_ptr, presences_ptr, out_ptr,  # as in `_slice_kernel`
    output_positions_ptr, min_tokens_ptr, num_listed_ptr,  # [max_rows] int32
    listed_ptr,  # [max_rows, max_listed, 2] int32
    vocab, logits_stride, mask_words, max_listed, behind, HAS_MASKS: tl.constexpr, LISTED: tl.constexpr,
):
    """Once more for the listed ids of a row, each of which is there once, from the model's own logits."""
    row = tl.program_id(0)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    is_early = tl.load(output_positions_ptr + state) - behind < tl.load(min_tokens_ptr + state)
    num_listed = tl.load(num_listed_ptr + state)
    for first in range(0, num_listed, LISTED):
        place = first + tl.arange(0, LISTED)
        inside = place < num_listed
        at = listed_ptr + (state.to(tl.int64) * max_listed + place) * 2
        word = tl.load(at, mask=inside, other=0)
        bias = tl.load(at + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
        ids = tl.where(word < 0, -1 - word, word)
        x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=inside, other=0.0).to(tl.float32)
        x = tl.where((word < 0) & is_early, float("-inf"), x)
        x = _changed(
            x, ids, inside, row, state, vocab, mask_words, masks_ptr, mask_rows_ptr, allowed_ptr, history_of_ptr,
            histories_ptr, repetitions_ptr, frequencies_ptr, presences_ptr, bias, HAS_MASKS)
        tl.store(out_ptr + row.to(tl.int64) * vocab + ids, x, mask=inside)


@triton.jit
def _max_kernel(
    rows_ptr, out_ptr, maxes_ptr, num_listed_ptr, vocab, num_slices, SLICE: tl.constexpr,
):
    """The slices' maxima again, of rows that have a list."""
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    if tl.load(num_listed_ptr + state) > 0:
        ids = part * SLICE + tl.arange(0, SLICE)
        x = tl.load(out_ptr + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
        tl.store(maxes_ptr + row * num_slices + part, tl.max(x, 0))


@triton.jit
def _settle_kernel(
    logits_ptr, rows_ptr, masks_ptr, mask_rows_ptr, allowed_ptr, out_ptr,  # as in `_slice_kernel`
    temperatures_ptr, limits_ptr,  # [max_rows] float32
    before_ptr, maxes_ptr,  # [num_rows, num_slices] float32: read, written
    vocab, logits_stride, mask_words, num_slices, HAS_MASKS: tl.constexpr, SLICE: tl.constexpr, SLICES: tl.constexpr,
):
    """Rows of which nothing is left, and min_p."""
    row, part = tl.program_id(0), tl.program_id(1)
    state = tl.load(rows_ptr + row)
    if state < 0:
        return
    at = tl.arange(0, SLICES)
    maxes = tl.load(before_ptr + row * num_slices + at, mask=at < num_slices, other=float("-inf"))
    top = tl.max(maxes, 0)
    best = tl.load(before_ptr + row * num_slices + part)
    limit = tl.load(limits_ptr + state)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < vocab
    out = out_ptr + row.to(tl.int64) * vocab + ids
    if top == float("-inf"):
        x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + ids, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        allowed = allowed_ptr + state.to(tl.int64) * mask_words
        if HAS_MASKS:
            mask = tl.load(mask_rows_ptr + row)
            if mask >= 0:
                x = _kept(x, masks_ptr + mask.to(tl.int64) * mask_words, ids, inside)
            else:
                x = _kept(x, allowed, ids, inside)
        else:
            x = _kept(x, allowed, ids, inside)
        tl.store(out, x, mask=inside)
        best = tl.max(x, 0)
    elif limit > 0:
        x = tl.load(out, mask=inside, other=float("-inf"))
        is_unlikely = (x - top) / tl.load(temperatures_ptr + state) < -limit
        tl.store(out, tl.full([SLICE], float("-inf"), tl.float32), mask=inside & is_unlikely)
    tl.store(maxes_ptr + row * num_slices + part, best)


def adjust_logits(
    logits: torch.Tensor, rows: torch.Tensor, output_positions: torch.Tensor, temperatures: torch.Tensor,
    changes: RowChanges, masks: torch.Tensor, mask_rows: torch.Tensor | None, maxes: torch.Tensor,
    out: torch.Tensor, *, behind: int, has_lists: bool, can_cut: bool, slice_size: int = SLICE,
) -> None:
    """As `reference`, into `out` [num_rows, vocab] float32; `logits` stay.

    `maxes` [2, at least num_rows, num_slices] float32: the second gets each row's largest of each slice, before min_p.
    `behind` is taken from `output_positions`.
    `has_lists`: a row may have listed ids. `can_cut`: a row may have a mask, allowed ids, end ids that count or a
    min_p; nothing else can leave nothing. min_p of a row that was left with nothing is not applied.
    """
    num_rows, vocab = logits.shape
    num_slices = -(-vocab // slice_size)
    assert logits.stride(1) == 1 and maxes.shape[0] == 2 and maxes.shape[2] == num_slices and maxes.is_contiguous()
    assert changes.listed.is_contiguous() and changes.allowed.is_contiguous() and changes.histories.is_contiguous()
    assert out.shape == logits.shape and out.is_contiguous() and out.dtype == torch.float32
    before, after = (maxes[0] if can_cut else maxes[1]), maxes[1]
    has_masks = mask_rows is not None
    mask_args = masks, rows if mask_rows is None else mask_rows, changes.allowed
    shared = *mask_args, changes.history_of, changes.histories, changes.repetitions, changes.frequencies, \
        changes.presences, out
    mask_words = changes.allowed.shape[1]
    grid = (num_rows, num_slices)
    _slice_kernel[grid](
        logits, rows, *shared, before, vocab, logits.stride(0), mask_words, num_slices, HAS_MASKS=has_masks,
        SLICE=slice_size, num_warps=4)
    if has_lists:
        _listed_kernel[(num_rows,)](
            logits, rows, *shared, output_positions, changes.min_tokens, changes.num_listed, changes.listed, vocab,
            logits.stride(0), mask_words, changes.listed.shape[1], behind, HAS_MASKS=has_masks, LISTED=_LISTED,
            num_warps=2)
        _max_kernel[grid](rows, out, before, changes.num_listed, vocab, num_slices, SLICE=slice_size, num_warps=4)
    if can_cut:
        _settle_kernel[grid](
            logits, rows, *mask_args, out, temperatures, changes.limits, before, after, vocab, logits.stride(0),
            mask_words, num_slices, HAS_MASKS=has_masks, SLICE=slice_size,
            SLICES=max(16, triton.next_power_of_2(num_slices)), num_warps=4)
