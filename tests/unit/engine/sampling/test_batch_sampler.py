from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.errors import InternalError
from common.sampling_params import SamplingParams
from engine.sampling.batch_sampler import BatchSampler
from engine.sampling.sequence import SampledSequence
from engine.sampling.truncation import kept
from engine.step import Join, PlannedRow
from tests import reference_sampler as reference

PLAIN = SamplingParams(max_tokens=64, seed=42)
ENDS = frozenset((2, 3))
PROMPT = (5, 9, 9, 17)
Words = np.ndarray


def _logits(seed: int, size: int = 1000, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32) * np.float32(scale)


def _with(**change: object) -> SamplingParams:
    return dataclasses.replace(PLAIN, **change)  # type: ignore[arg-type]


def _bits(ids: Sequence[int], size: int) -> Words:
    words = np.zeros(-(-size // 32), np.uint32)
    for token_id in ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def _draw(
    logits: np.ndarray, params: SamplingParams, outputs: Sequence[int] = (), choice: int = 0,
    words: Words | None = None, position: int | None = None,
) -> int:
    """Alone, in a sampler of its own."""
    sampler = BatchSampler(ENDS)
    row = _joined(sampler, "r", params, outputs, choice)
    row = row if position is None else row._replace(output_position=position)
    return sampler.draw([row], logits[None], [words])[0][0]


def _joined(
    sampler: BatchSampler, name: str, params: SamplingParams, outputs: Sequence[int] = (), choice: int = 0
) -> PlannedRow:
    known = (*PROMPT, *outputs)
    sampler.join(Join(name, known, len(PROMPT), params, choice))
    row = PlannedRow(name, known[-1:], len(known) - 1, (), True, len(outputs), params)
    sampler.learn(row)
    return row


ANY_PARAMS = st.builds(
    _with, seed=st.integers(0, 2**64 - 1), temperature=st.sampled_from((0.0, 0.3, 1.0, 2.0)),
    top_k=st.sampled_from((0, 0, 1, 2, 7, 100)), top_p=st.sampled_from((1.0, 1.0, 0.05, 0.6, 0.95)),
    min_p=st.sampled_from((0.0, 0.0, 0.02, 0.5, 1.0)), presence_penalty=st.sampled_from((0.0, -2.0, 0.7)),
    frequency_penalty=st.sampled_from((0.0, -1.0, 0.4)), repetition_penalty=st.sampled_from((1.0, 0.5, 1.3)),
    logit_bias=st.sampled_from(({}, {4: 3.0, 9: -100.0, 39: 1.5})), stop_token_ids=st.sampled_from(((), (11, 12))),
    min_tokens=st.sampled_from((0, 3)), bad_words=st.sampled_from(((), ((6,), (7, 8), (1, 7, 9)))),
    allowed_token_ids=st.sampled_from((None, tuple(range(0, 40, 3)), (2, 7, 8, 20))))
OUTPUTS = st.sampled_from(((), (7,), (1, 7), (1, 7, 8, 8, 8), (2, 30, 31, 7)))
GRAMMAR = st.sampled_from((None, tuple(range(1, 40, 2)), (8, 2, 14)))


@given(params=ANY_PARAMS, outputs=OUTPUTS, grammar=GRAMMAR, choice=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_each_draw_is_that_of_the_plain_reference(
    params: SamplingParams, outputs: tuple[int, ...], grammar: tuple[int, ...] | None, choice: int, seed: int
) -> None:
    logits = np.round(_logits(seed, 40), 1)  # rounded: with ties
    changed = reference.changed_logits(
        logits.tolist(), params, PROMPT, outputs, ENDS, None if grammar is None else set(grammar))
    if max(changed) == -np.inf:  # nothing is left: another test
        return
    words = None if grammar is None else _bits(grammar, 40)
    drawn = _draw(logits, params, outputs, choice, words)
    if params.is_greedy:
        assert drawn == reference.draw(changed, dataclasses.replace(params, temperature=0.0), 0)
        return
    wanted = {reference.draw(changed, dataclasses.replace(params, top_p=top_p), len(outputs), choice)
              for top_p in (params.top_p, min(1.0, params.top_p * (1 + 1e-9)), params.top_p * (1 - 1e-9))}
    assert drawn in wanted  # a cut may fall to either side of a rounding


@given(rows=st.lists(st.tuples(ANY_PARAMS, OUTPUTS, GRAMMAR, st.integers(0, 3)), min_size=2, max_size=12),
       seed=st.integers(0, 99), size=st.sampled_from((40, 1000, 70_000)))
@settings(max_examples=25, deadline=None)
def test_a_row_draws_the_same_alone_and_beside_any_others(
    rows: list[tuple[SamplingParams, tuple[int, ...], tuple[int, ...] | None, int]], seed: int, size: int
) -> None:
    logits = np.stack([_logits(seed + i, size) for i in range(len(rows))])
    before = logits.copy()
    sampler = BatchSampler(ENDS)
    params = [dataclasses.replace(params, logprobs=[None, 0, 5][i % 3]) for i, (params, *_) in enumerate(rows)]
    planned = [_joined(sampler, f"r{i}", params[i], row[1], row[3]) for i, row in enumerate(rows)]
    masks = [None if row[2] is None else _bits(row[2], size) for row in rows]
    tokens, scores = sampler.draw(planned, logits, masks)
    assert np.array_equal(logits, before)
    for i, row in enumerate(rows):
        alone = BatchSampler(ENDS)
        planned_alone = _joined(alone, "alone", params[i], row[1], row[3])
        assert alone.draw([planned_alone], logits[i : i + 1].copy(), [masks[i]]) == ([tokens[i]], [scores[i]])


def test_choice_zero_draws_as_a_request_of_one_and_the_others_differ() -> None:
    flat = np.zeros(10_000, np.float32)
    drawn = [_draw(flat, PLAIN, choice=choice) for choice in range(20)]
    assert drawn[0] == reference.draw([0.0] * 10_000, PLAIN, 0)
    assert len(set(drawn)) > 18


def test_seed_and_position_each_change_the_draw() -> None:
    flat = np.zeros(10_000, np.float32)
    assert len({_draw(flat, PLAIN, position=position) for position in range(50)}) > 45
    assert len({_draw(flat, _with(seed=seed)) for seed in range(50)}) > 45
    assert _draw(flat, _with(seed=2**64 - 1), position=2**31 - 1) in range(10_000)


@pytest.mark.parametrize("temperature", [1e-4, 1e-7, 1e-30, 5e-324])
@pytest.mark.parametrize("change", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_tiny_temperature_is_greedy_without_a_warning(temperature: float, change: dict[str, object]) -> None:
    for seed in range(20):
        logits = _logits(seed)
        second, first = np.sort(logits)[-2:]
        if first - second >= 20 * temperature:
            params = _with(temperature=temperature, seed=seed, **change)
            assert _draw(logits, params, position=seed) == int(logits.argmax())


@pytest.mark.parametrize("params", [
    _with(), _with(temperature=0.5), _with(top_k=3), _with(top_p=0.7), _with(min_p=0.3),
    _with(top_k=5, top_p=0.6, temperature=1.5)])
def test_tokens_come_as_often_as_their_probability_says(params: SamplingParams) -> None:
    logits = np.array([0.3, 2.0, -1.0, 1.1, 0.0, 1.9, -3.0], np.float32)
    draws = 3000
    sampler = BatchSampler(ENDS)
    rows = [_joined(sampler, f"r{i}", dataclasses.replace(params, seed=i)) for i in range(draws)]
    tokens, _ = sampler.draw(rows, np.tile(logits, (draws, 1)), [None] * draws)
    counts = np.bincount(tokens, minlength=7)
    kept = sorted(reference.support(logits.tolist(), params))
    odds = np.exp(logits[kept].astype(np.float64) / params.temperature)
    expected = draws * odds / odds.sum()
    assert counts.sum() == counts[kept].sum()
    chi_square = float((((counts[kept] - expected) ** 2) / expected).sum())
    assert chi_square < 27.9  # six degrees of freedom or fewer: passed by chance 9999 times in 10000; seeds are fixed


@pytest.mark.parametrize("scale", [0.0, 2.0, 2.5, 15.0])
def test_leaving_out_hopeless_ids_changes_no_draw(scale: float) -> None:
    for seed in range(12):
        logits = _logits(seed, 4000, scale)
        full = [float(logit) - float(logits.max()) + reference.noise(seed, 0, 3, i) for i, logit in enumerate(logits)]
        assert _draw(logits, _with(seed=seed), position=3) == int(np.argmax(full))


def _warped(processor: object, logits: np.ndarray, known: Sequence[int]) -> np.ndarray:
    return processor(torch.tensor([known]), torch.from_numpy(logits[None].copy()))[0].numpy()  # type: ignore[operator]


def _changed(logits: np.ndarray, params: SamplingParams, outputs: Sequence[int] = ()) -> np.ndarray:
    sequence = SampledSequence(params, ENDS, Join("r", (*PROMPT, *outputs), len(PROMPT), params, 0))
    row = logits.copy()
    sequence.change(row, len(outputs), None)
    return row


def test_repetition_bad_words_and_min_tokens_change_logits_as_transformers_does() -> None:
    logits, outputs = _logits(3, 50), (7, 8, 8)
    known = (*PROMPT, *outputs)
    cases: list[tuple[SamplingParams, object]] = [
        (_with(repetition_penalty=1.4), RepetitionPenaltyLogitsProcessor(1.4)),
        (_with(repetition_penalty=0.7), RepetitionPenaltyLogitsProcessor(0.7)),
        (_with(bad_words=((4,), (8, 8, 20), (9, 8, 1))), NoBadWordsLogitsProcessor([[4], [8, 8, 20], [9, 8, 1]])),
        (_with(min_tokens=4), MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, sorted(ENDS))),
        (_with(min_tokens=3, repetition_penalty=1.1), RepetitionPenaltyLogitsProcessor(1.1))]
    for params, processor in cases:
        np.testing.assert_allclose(_changed(logits, params, outputs), _warped(processor, logits, known), rtol=1e-6)


@pytest.mark.parametrize(("params", "processor"), [
    (_with(top_k=7), TopKLogitsWarper(7)), (_with(top_p=0.8), TopPLogitsWarper(0.8)),
    (_with(top_p=0.999), TopPLogitsWarper(0.999)),
    (_with(min_p=0.1), MinPLogitsWarper(0.1))])
def test_the_tokens_that_are_left_are_those_of_transformers(params: SamplingParams, processor: object) -> None:
    for seed in range(40):
        logits = _logits(seed, 300, 2.0)
        left = np.flatnonzero(np.isfinite(_warped(processor, logits, PROMPT)))
        ids, _ = kept(logits, float(logits.max()), params)
        assert sorted(ids.tolist()) == left.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_a_logit_bias_of_100_forces_and_of_minus_100_forbids(temperature: float) -> None:
    logits = _logits(9)
    best, other = int(logits.argmax()), 17
    for position in range(30):
        assert _draw(logits, _with(temperature=temperature, logit_bias={other: 100.0}), position=position) == other
        assert _draw(logits, _with(temperature=temperature, logit_bias={best: -100.0}), position=position) != best


def test_the_grammar_wins_where_nothing_else_is_left_and_without_one_the_allowed_ids() -> None:
    logits = _logits(1, 64)
    only_ends = _bits(sorted(ENDS), 64)
    assert _draw(logits, _with(min_tokens=5), words=only_ends) in ENDS
    assert _draw(logits, _with(allowed_token_ids=(7,)), words=only_ends) in ENDS
    assert _draw(logits, _with(allowed_token_ids=(2,), min_tokens=5)) == 2
    assert _draw(logits, _with(allowed_token_ids=(7,), bad_words=((7,),))) == 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(bad: float) -> None:
    logits = _logits(1)
    logits[4] = bad
    with pytest.raises(InternalError, match="not finite"):
        _draw(logits, PLAIN)


def test_a_sequence_that_needs_its_history_has_to_join() -> None:
    row = PlannedRow("r", (1,), 0, (), True, 0, _with(presence_penalty=1.0))
    with pytest.raises(InternalError, match="never joined"):
        BatchSampler(ENDS).draw([row], _logits(1)[None], [None])


def test_nothing_is_left_of_a_forgotten_sequence() -> None:
    sampler = BatchSampler(ENDS)
    params = _with(temperature=0.0, frequency_penalty=2.0)
    row = _joined(sampler, "r", params, outputs=[7] * 20)
    logits = np.zeros((1, 32), np.float32)
    logits[0, 7] = 1.0
    assert sampler.draw([row], logits, [None])[0] != [7]
    sampler.forget("r")
    assert len(sampler) == 0
    again = _joined(sampler, "r", params)
    assert sampler.draw([again], logits, [None])[0] == [7]
