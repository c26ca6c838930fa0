"""Log-probabilities of tokens by the model's own logits. Torch-free."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.generation import TokenLogprobs

_SPREADS = (8.0, 24.0)  # below the best: the first that holds enough ids is taken


def token_logprobs(row: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Of `token_id` and of the `num_top` likeliest by `row` [vocab] of logits. At most 0, and finite."""
    top = row.max()
    log_sum = float(top) + float(np.log(np.exp(row - top).sum(dtype=np.float64)))
    ids = largest(row, top, num_top)
    return TokenLogprobs(
        min(0.0, float(row[token_id]) - log_sum), tuple(ids.tolist()),
        tuple(min(0.0, float(logit) - log_sum) for logit in row[ids]))


def largest(row: NDArray[np.float32], top: np.float32, count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest, largest first; equal ones by id. `top` is the maximum."""
    if count <= 1:
        return np.array([row.argmax()][:count], np.int64)
    ids = np.arange(len(row))
    for spread in _SPREADS:
        near = np.flatnonzero(row >= top - np.float32(spread))
        if len(near) >= count:
            ids = near
            break
    if len(ids) > 4 * count:
        least = np.partition(row[ids], len(ids) - count)[len(ids) - count]
        ids = ids[row[ids] >= least]
    return ids[np.argsort(-row[ids], kind="stable")][:count]
