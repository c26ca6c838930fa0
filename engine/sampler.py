"""One token from one row of logits: a pure function of (logits, params, output position). Torch-free.

Randomness is counter-based: the noise of a vocabulary id is a hash of (seed, output position, id), so a request
draws the same tokens alone, in any batch, after preemption and on another worker. A token is drawn by the
Gumbel-max trick (Gumbel 1954): the argmax of `logit / temperature + noise` has exactly the softmax's odds, with no
sum over the vocabulary and no division by a tiny number's exponent. The hash is splitmix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.errors import InternalError
from common.sampling_params import SamplingParams

Logits = NDArray[np.float32]

_MASK = (1 << 64) - 1
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Noise lies between -log(53 log 2) and 53 log 2: an id whose scaled logit is further below the best can never win.
_NOISE_SPREAD = 40.5


def draw(logits: Logits, params: SamplingParams, output_position: int) -> int:
    """`logits` [vocab] float32, not changed → a token id. Equal scores go to the lowest id.

    Order: logit_bias, temperature, top_k, then top_p over what top_k left. Raises `InternalError` when the best
    logit is not a finite number.
    """
    if params.logit_bias:
        logits = logits.copy()
        logits[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise InternalError(f"the model's logits are not finite (best is {logits[best]} at token {best})")
    if params.temperature == 0.0 or params.top_k == 1:
        return best
    top = float(logits[best])
    ids = np.flatnonzero(logits >= top - _NOISE_SPREAD * params.temperature)
    with np.errstate(over="ignore"):  # at a tiny temperature the losers go to -inf; the best stays at 0
        scaled = (logits[ids].astype(np.float64) - top) / params.temperature
    if 0 < params.top_k < len(ids) or params.top_p < 1.0:
        ids, scaled = _truncate(ids, scaled, params)
    scores = scaled + gumbel(params.seed, output_position, ids)
    return int(ids[scores == scores.max()].min())


def _truncate(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The `top_k` best, and of these the fewest best whose probabilities reach `top_p`; at least one is kept."""
    order = np.argsort(-scaled, kind="stable")  # ids ascend, so equal logits keep the lower id first
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        weights = np.exp(scaled[order])
        before = np.cumsum(weights) - weights
        order = order[: max(1, int(np.count_nonzero(before < params.top_p * weights.sum())))]
    return ids[order], scaled[order]


def gumbel(seed: int, output_position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for the vocabulary `ids` at one output position of a seeded request."""
    key = _mix(_mix(seed + _STEP) ^ output_position)
    bits = np.uint64(key) + ids.astype(np.uint64) * np.uint64(_STEP)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
    bits ^= bits >> np.uint64(31)
    # 52 bits and a half: strictly between 0 and 1, exact in float64.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def _mix(word: int) -> int:
    """splitmix64's finaliser on one word."""
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)
