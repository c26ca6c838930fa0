"""Draws from whole rows of logits. Torch-free.

The noise of almost all ids is too small to matter, and its hash shows that without a logarithm: the ids near the best
are scored first; a far id is scored only if its hash alone could lift it over the best score so far.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.sampling.noise import NOISE_SPREAD, UInt64s, gumbel, id_steps, least_bits, mixed

Floats = NDArray[np.float32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

_NEAR_SPREAD = 5.0


def draw_rows(logits: Floats, top: Floats, temperatures: Float64s, keys: UInt64s) -> Int64s:
    """`logits` [rows, vocab], `top` [rows] their finite maxima, temperatures > 0 [rows], keys [rows] → ids [rows].

    Equal scores go to the lowest id.
    """
    with np.errstate(over="ignore"):
        near_cut = (top - _NEAR_SPREAD * temperatures).astype(np.float32)
    is_near = logits >= near_cut[:, None]
    rows, ids = _where(is_near)
    scores = _scores(logits, top, temperatures, keys, rows, ids)
    starts = np.searchsorted(rows, np.arange(len(logits)))
    best = np.maximum.reduceat(scores, starts)
    firsts = np.flatnonzero(scores == best[rows])[::-1]
    drawn = np.empty(len(logits), np.int64)
    drawn[rows[firsts]] = ids[firsts]  # of equal ones the lowest id is written last
    far = _far_candidates(logits, is_near, top, near_cut, best, temperatures, keys)
    far_scores = _scores(logits, top, temperatures, keys, *far)
    for row, token_id, score in zip(*far, far_scores, strict=True):
        if (score, -token_id) > (best[row], -drawn[row]):
            best[row], drawn[row] = score, token_id
    return drawn


def _far_candidates(
    logits: Floats, is_near: NDArray[np.bool_], top: Floats, near_cut: Floats, best: Float64s,
    temperatures: Float64s, keys: UInt64s,
) -> tuple[Int64s, Int64s]:
    """(rows, ids) that are not near and whose noise could still win."""
    with np.errstate(over="ignore"):
        cut = (top - NOISE_SPREAD * temperatures).astype(np.float32)
        least_noise = best - (near_cut.astype(np.float64) - top) / temperatures
    is_candidate = logits >= cut[:, None]
    is_candidate ^= is_near
    steps = id_steps(logits.shape[1])
    if 8 * np.count_nonzero(is_candidate) < is_candidate.size:
        rows, ids = _where(is_candidate)
        may_win = mixed(keys[rows] + steps[ids]) >= least_bits(least_noise - 1e-9)[rows]
        return rows[may_win], ids[may_win]
    is_candidate &= mixed(keys[:, None] + steps) >= least_bits(least_noise - 1e-9)[:, None]
    return _where(is_candidate)


def _where(mask: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """(rows, columns) in order: as `np.nonzero`, but faster by far."""
    rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return rows, columns


def _scores(
    logits: Floats, top: Floats, temperatures: Float64s, keys: UInt64s, rows: Int64s, ids: Int64s
) -> Float64s:
    with np.errstate(over="ignore"):  # at a tiny temperature the losers go to -inf; the best stays at 0
        scaled = (logits[rows, ids].astype(np.float64) - top[rows]) / temperatures[rows]
    return scaled + gumbel(mixed(keys[rows] + id_steps(logits.shape[1])[ids]))
