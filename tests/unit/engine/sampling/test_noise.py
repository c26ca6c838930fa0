from __future__ import annotations

import numpy as np

from engine.sampling.noise import gumbel, id_steps, least_bits, mixed, row_key, seed_key

KNOWN_NOISE = [-0.2594528220585539, 0.4739903322282244, -0.2482497142588607]  # seed 42, position 7, ids 3, 0, 49151


def _noise(seed: int, position: int, ids: list[int], choice: int = 0) -> np.ndarray:
    return gumbel(mixed(np.uint64(row_key(seed_key(seed, choice), position)) + id_steps(49152)[ids]))


def test_known_noise_stays_as_it_is_so_that_other_workers_and_versions_repeat_it() -> None:
    again = _noise(42, 7, [3, 0, 49151])
    assert np.array_equal(again[1:2], _noise(42, 7, [0]))  # an id's noise does not depend on the others
    np.testing.assert_allclose(again, KNOWN_NOISE, rtol=1e-12)


def test_choices_have_noise_of_their_own() -> None:
    assert len({float(_noise(42, 7, [3], choice)[0]) for choice in range(64)}) == 64


def test_words_below_the_least_bits_have_less_noise() -> None:
    words = mixed(id_steps(200_000).copy())
    noise = gumbel(words)
    for least in (-5.0, -0.3, 0.0, 2.0, 9.0, 30.0, 800.0):
        bound = least_bits(np.array([least]))[0]
        assert (words[noise >= least] >= bound).all()
        assert np.count_nonzero(words >= bound) <= np.count_nonzero(noise >= least - 1e-6)
