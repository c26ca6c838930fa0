"""Draws from the tokens that min_p, top_k and top_p leave, without sorting the vocabulary. Torch-free."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from common.sampling_params import SamplingParams
from engine.sampling.noise import NOISE_SPREAD, gumbel, id_steps, mixed

Floats = NDArray[np.float32]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

_SPREADS = (4.0, 10.0, NOISE_SPREAD)  # below the best, in scaled logits: the first wide enough is taken


def is_truncated(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def draw_truncated(row: Floats, top: float, params: SamplingParams, key: int) -> int:
    """`row` [vocab] with the finite maximum `top`; temperature > 0. Equal scores go to the lowest id."""
    ids, scaled = kept(row, top, params)
    scores = scaled + gumbel(mixed(np.uint64(key) + id_steps(len(row))[ids]))
    return int(ids[scores == scores.max()].min())


def kept(row: Floats, top: float, params: SamplingParams) -> tuple[Int64s, Float64s]:
    """The ids that stay, at least one, and their scaled logits (0 for the best).

    min_p: at least so likely, relative to the likeliest. Then the `top_k` best, of equal ones the lower ids. Then of
    these the fewest best whose probabilities reach `top_p`.
    """
    limit = min(NOISE_SPREAD, -math.log(params.min_p)) if params.min_p > 0.0 else NOISE_SPREAD
    ids, scaled = _within_spread(row, top, params.temperature, limit, params.top_k)
    if params.min_p > 0.0:
        stays = scaled >= -limit
        ids, scaled = ids[stays], scaled[stays]
    if 0 < params.top_k < len(ids):
        ids, scaled = _best(ids, scaled, params.top_k)
    return _nucleus(ids, scaled, params.top_p) if params.top_p < 1.0 else (ids, scaled)


def _within_spread(
    row: Floats, top: float, temperature: float, limit: float, count: int
) -> tuple[Int64s, Float64s]:
    """Ascending ids within `limit` of the best; or only within less, if `count` > 0 of them are there."""
    for spread in (*(s for s in _SPREADS if s < limit and count), limit):
        ids = np.flatnonzero(row >= np.float32(max(top - spread * temperature, -3e38)))
        if 0 < count <= len(ids):
            break
    with np.errstate(over="ignore"):  # at a tiny temperature the losers go to -inf; the best stays at 0
        return ids, (row[ids].astype(np.float64) - top) / temperature


def _best(ids: Int64s, scaled: Float64s, count: int) -> tuple[Int64s, Float64s]:
    least = np.partition(scaled, len(scaled) - count)[len(scaled) - count]
    stays = scaled > least
    ties = np.flatnonzero(scaled == least)
    stays[ties[: count - int(np.count_nonzero(stays))]] = True
    return ids[stays], scaled[stays]


def _nucleus(ids: Int64s, scaled: Float64s, top_p: float) -> tuple[Int64s, Float64s]:
    weights = np.exp(scaled)
    mass = top_p * weights.sum()
    head = np.arange(len(ids))
    for spread in _SPREADS:
        near = np.flatnonzero(scaled >= -spread)
        if weights[near].sum() >= mass:
            head = near
            break
    order = head[np.argsort(-scaled[head], kind="stable")]  # ids ascend, so equal logits keep the lower id first
    sorted_weights = weights[order]
    before = np.cumsum(sorted_weights) - sorted_weights
    order = order[: max(1, int(np.count_nonzero(before < mass)))]
    return ids[order], scaled[order]
