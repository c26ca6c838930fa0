from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InternalError
from common.sampling_params import SamplingParams
from engine.sampler import draw, gumbel

PLAIN = SamplingParams(max_tokens=1, seed=42)
KNOWN_NOISE = [-0.2594528220585539, 0.4739903322282244, -0.2482497142588607]  # seed 42, position 7, ids 3, 0, 49151


def _logits(seed: int, size: int = 1000, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(scale)


def _with(**change: object) -> SamplingParams:
    return dataclasses.replace(PLAIN, **change)  # type: ignore[arg-type]


def _support(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """The naive definition: sort by probability, ties by id; cut at k; cut where the mass reaches p."""
    probs = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    order = sorted(range(len(logits)), key=lambda i: (-probs[i], i))
    order = order[: params.top_k] if params.top_k else order
    total, mass = sum(probs[i] for i in order), 0.0
    kept: set[int] = set()
    for i in order:
        if kept and mass >= params.top_p * total:
            break
        kept.add(i)
        mass += probs[i]
    return kept


def test_the_same_request_draws_the_same_token_every_time() -> None:
    logits = _logits(1)
    before = logits.copy()
    assert len({draw(logits, PLAIN, 5) for _ in range(5)}) == 1
    assert np.array_equal(logits, before)


def test_seed_and_position_each_change_the_draw() -> None:
    flat = np.zeros(10000, np.float32)
    assert len({draw(flat, PLAIN, position) for position in range(50)}) > 45
    assert len({draw(flat, _with(seed=seed), 0) for seed in range(50)}) > 45
    assert draw(flat, _with(seed=2**64 - 1), 2**31 - 1) in range(10000)


def test_known_noise_stays_as_it_is_so_that_other_workers_and_versions_repeat_it() -> None:
    again = gumbel(42, 7, np.array([3, 0, 49151]))
    assert np.array_equal(again[1], gumbel(42, 7, np.array([0]))[0])  # an id's noise does not depend on the others
    np.testing.assert_allclose(again, KNOWN_NOISE, rtol=1e-12)


def test_zero_temperature_is_the_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = np.array([1, 5, 5, 2], np.float32)
    assert draw(logits, _with(temperature=0.0), 0) == 1


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy_without_a_warning(temperature: float) -> None:
    for seed in range(20):
        logits = _logits(seed)
        second, first = np.sort(logits)[-2:]
        if first - second >= 20 * temperature:
            assert draw(logits, _with(temperature=temperature, seed=seed), seed) == int(logits.argmax())


@given(seed=st.integers(0, 2**64 - 1), top_k=st.integers(0, 40), top_p=st.floats(0.01, 1.0),
       temperature=st.floats(0.05, 2.0), scale=st.floats(0.0, 8.0))
@settings(max_examples=150, deadline=None)
def test_only_tokens_that_top_k_and_top_p_leave_are_drawn(
    seed: int, top_k: int, top_p: float, temperature: float, scale: float
) -> None:
    logits = np.round(_logits(seed % 1000, 60, scale), 1)  # rounded: with ties
    params = _with(seed=seed, top_k=top_k, top_p=top_p, temperature=temperature)
    nearly = dataclasses.replace(params, top_p=min(1.0, top_p + 1e-9))  # a cut may fall to either side of a rounding
    assert {draw(logits, params, position) for position in range(20)} <= _support(logits, nearly)


@pytest.mark.parametrize("params", [
    _with(), _with(temperature=0.5), _with(top_k=3), _with(top_p=0.7), _with(top_k=5, top_p=0.6, temperature=1.5)])
def test_tokens_come_as_often_as_their_probability_says(params: SamplingParams) -> None:
    logits = np.array([0.3, 2.0, -1.0, 1.1, 0.0, 1.9, -3.0], np.float32)
    draws = 6000
    counts = np.bincount([draw(logits, _with_seed(params, i), i % 7) for i in range(draws)], minlength=7)
    kept = sorted(_support(logits, params))
    odds = np.exp(logits[kept].astype(np.float64) / params.temperature)
    expected = draws * odds / odds.sum()
    assert counts.sum() == counts[kept].sum()
    chi_square = float((((counts[kept] - expected) ** 2) / expected).sum())
    assert chi_square < 27.9  # six degrees of freedom or fewer: passed by chance 9999 times in 10000; seeds are fixed


def _with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return dataclasses.replace(params, seed=seed)


def test_leaving_out_hopeless_ids_changes_no_draw() -> None:
    for seed in range(50):
        logits = _logits(seed, scale=15.0)
        ids = np.arange(len(logits))
        full = logits.astype(np.float64) - logits.max() + gumbel(seed, 3, ids)
        assert draw(logits, _with(seed=seed), 3) == int(full.argmax())


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_a_logit_bias_of_100_forces_and_of_minus_100_forbids(temperature: float) -> None:
    logits = _logits(9)
    best, other = int(logits.argmax()), 17
    for position in range(30):
        assert draw(logits, _with(temperature=temperature, logit_bias={other: 100.0}), position) == other
        assert draw(logits, _with(temperature=temperature, logit_bias={best: -100.0}), position) != best


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(bad: float) -> None:
    logits = _logits(1)
    logits[4] = bad
    with pytest.raises(InternalError, match="not finite"):
        draw(logits, PLAIN, 0)
