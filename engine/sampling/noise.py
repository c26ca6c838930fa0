"""Counter-based noise: that of a vocabulary id is a hash of (seed, choice, output position, id). Torch-free.

So a request draws the same tokens alone, in any batch, after preemption and on another worker. The hash is splitmix64
(Steele, Lea, Flood 2014), the noise is Gumbel's (1954): the argmax of `logit / temperature + noise` has exactly the
softmax's odds, with no sum over the vocabulary and no division by a tiny number's exponent.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_STEP, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Noise lies between -log(53 log 2) and 53 log 2: an id whose scaled logit is further below the best can never win.
NOISE_SPREAD = 40.5


@lru_cache(maxsize=4096)
def seed_key(seed: int, choice: int) -> int:
    """The 64-bit key of one choice of a seeded request."""
    key = _mix(seed + _STEP)
    return key if choice == 0 else _mix(key + choice * _STEP)


def row_key(key: int, output_position: int) -> int:
    """The key of the draw at one output position, from `seed_key`."""
    return _mix(key ^ output_position)


@lru_cache(maxsize=4)
def id_steps(vocab_size: int) -> UInt64s:
    """What each id adds to a row's key, [vocab_size]; not to be changed."""
    return np.arange(vocab_size, dtype=np.uint64) * np.uint64(_STEP)


def mixed(words: UInt64s) -> UInt64s:
    """splitmix64's finaliser, in place."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(_MIX_1)
    words ^= np.right_shift(words, np.uint64(27), out=shifted)
    words *= np.uint64(_MIX_2)
    words ^= np.right_shift(words, np.uint64(31), out=shifted)
    return words


def gumbel(bits: UInt64s) -> NDArray[np.float64]:
    """Standard Gumbel noise of hashed words."""
    # 52 bits and a half: strictly between 0 and 1, exact in float64.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)))


def least_bits(noise: NDArray[np.float64]) -> UInt64s:
    """Words below these have less noise than `noise`; a little lower than exact."""
    with np.errstate(over="ignore"):
        uniform = np.exp(-np.exp(-noise))
    return np.asarray(np.maximum(uniform * 2.0**52 - 4.5, 0.0).astype(np.uint64) << np.uint64(12))


def _mix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MIX_1) & _MASK
    word = ((word ^ (word >> 27)) * _MIX_2) & _MASK
    return word ^ (word >> 31)
