"""Draws on the device give the tokens and scores of the sampler on the CPU, whatever a row asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from common.generation import TokenLogprobs
from common.grammar import Grammar, GrammarKind
from common.sampling_params import SamplingParams
from engine.gpu.device_sampling import DeviceSampling
from engine.sampling.batch_sampler import BatchSampler
from engine.sampling.noise import seed_key
from engine.step import DecodeRows, Join, PlannedRow, StepPlan
from kernels.gumbel_argmax import gumbel_argmax
from tests.kernel_mode import DEVICE, DTYPES, ON_GPU

VOCAB, SLICE = (151936, 4096) if ON_GPU else (1003, 1024)
ENDS = frozenset({0, 7})
PROMPT = [3, 5, 5, 900, 42, 17]


class Rows:
    """What `DeviceRows` shows of its rows to draws."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.keys = torch.zeros(max_rows, dtype=torch.int64, device=DEVICE)
        self.output_positions = torch.zeros(max_rows, dtype=torch.int32, device=DEVICE)
        self.temperatures = torch.zeros(max_rows, device=DEVICE)


class Pair:
    """The same sequences on the device and at the CPU's sampler; sequence i has row `max_rows - 1 - i`."""

    def __init__(self, params: Sequence[SamplingParams], max_histories: int = 8) -> None:
        rows: Any = Rows(len(params) + 2)
        self.params, self.state = params, rows
        self.sampling = DeviceSampling(rows, VOCAB, ENDS, len(params) + 1, DEVICE, max_histories, SLICE)
        self.sampler = BatchSampler(ENDS)
        self.names = [f"s{i}" for i in range(len(params))]
        self.rows = [rows.max_rows - 1 - i for i in range(len(params))]
        self.is_here = []
        for i, name in enumerate(self.names):
            join = Join(name, PROMPT, len(PROMPT), params[i], 0)
            self.sampler.join(join)
            self.is_here.append(self.sampling.join(join, self.rows[i]))
            rows.keys[self.rows[i]] = int(np.uint64(seed_key(params[i].seed, 0)).view(np.int64))
            rows.temperatures[self.rows[i]] = 0.0 if params[i].is_greedy else params[i].temperature

    def draw(
        self, position: int, logits: torch.Tensor, masks: dict[int, np.ndarray[Any, Any]]
    ) -> tuple[list[int], dict[int, TokenLogprobs], list[int], list[TokenLogprobs | None]]:
        """(ids, scores) of the device, then those of the CPU, whose ids both sides go on from."""
        num, start = len(self.names), len(PROMPT) + position - 1
        plan = StepPlan(position, [], DecodeRows(
            self.names, [1] * num, [start] * num, [()] * num, [position] * num, self.params))
        self.state.output_positions[:] = position + 1  # as the step has left it
        drawn = torch.full((num,), -9, device=DEVICE)
        on_device = torch.tensor(self.rows, dtype=torch.int32, device=DEVICE)
        pending = self.sampling.draw(plan, range(num), logits, on_device, drawn, masks)
        if ON_GPU:
            torch.cuda.synchronize()
        planned = [PlannedRow(name, (1,), start, (), True, position, params)
                   for name, params in zip(self.names, self.params, strict=True)]
        ids, scores = self.sampler.draw(planned, logits.float().cpu().numpy(), [masks.get(i) for i in range(num)])
        return drawn.tolist(), pending.ready() if pending else {}, ids, scores


def _mask(ids: Sequence[int]) -> np.ndarray[Any, Any]:
    bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _params(**wishes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 50, "seed": 12345, **wishes})


EVERYTHING = [
    _params(), _params(temperature=0.0), _params(top_k=5, temperature=1.7, seed=7), _params(top_p=0.7, logprobs=3),
    _params(min_p=0.2, temperature=0.6, logprobs=0), _params(repetition_penalty=1.6, top_k=20, top_p=0.8),
    _params(temperature=0.0, frequency_penalty=1.9, presence_penalty=0.5, logprobs=20),
    _params(min_tokens=2, logit_bias={7: 100.0, 12: 3.0}, stop_token_ids=(12, 13)),
    _params(allowed_token_ids=(0, 4, 400, 401), min_tokens=9, temperature=2.0),
    _params(top_p=0.9, logit_bias={5: -100.0}, presence_penalty=-1.0)]


def test_tokens_and_scores_are_the_cpu_samplers_for_every_kind_of_wish() -> None:
    pair = Pair(EVERYTHING)
    assert all(pair.is_here)
    for position in range(3 if ON_GPU else 2):
        logits = (torch.randn(len(EVERYTHING), VOCAB, device=DEVICE) * 3).to(DTYPES[0])
        masks = {0: _mask(range(30, 60)), 3: _mask([1, 2, 3, 5, 7]), 8: _mask([4, 9])} if position == 1 else {}
        found, scores, expected, expected_scores = pair.draw(position, logits, masks)
        assert found == expected
        for i, score in enumerate(expected_scores):
            if score is None:
                assert i not in scores
                continue
            assert scores[i].top_token_ids == score.top_token_ids
            assert scores[i].logprob == pytest.approx(score.logprob, abs=1e-4)
            assert scores[i].top_logprobs == pytest.approx(score.top_logprobs, abs=1e-4)


def test_a_row_that_asks_for_nothing_draws_the_same_beside_rows_that_do() -> None:
    num = 3 if not ON_GPU else 64
    params = [_params(seed=i, top_p=0.5 if i == 1 else 1.0) for i in range(num)]
    pair = Pair(params)
    logits = (torch.randn(num, VOCAB, device=DEVICE) * 2).to(DTYPES[0])
    found, *_ = pair.draw(4, logits, {})
    alone = torch.zeros(num, dtype=torch.int64, device=DEVICE)
    slices = -(-VOCAB // SLICE)
    gumbel_argmax(
        logits, torch.tensor(pair.rows, dtype=torch.int32, device=DEVICE), pair.state.keys,
        pair.state.output_positions, pair.state.temperatures, torch.empty(num, slices, device=DEVICE),
        torch.empty(num, slices, dtype=torch.int32, device=DEVICE), alone, behind=1, slice_size=SLICE)
    assert [found[i] for i in range(num) if i != 1] == [alone[i].item() for i in range(num) if i != 1]


def test_what_only_the_host_can_draw_is_left_to_it() -> None:
    grammar = Grammar(GrammarKind.CHOICE, '["a"]')
    pair = Pair([
        _params(bad_words=((1, 2),)), _params(presence_penalty=1.0, grammar=grammar), _params(grammar=grammar),
        _params(presence_penalty=1.0), _params(presence_penalty=1.0)], max_histories=1)
    assert pair.is_here == [False, False, True, True, False]
    plan = StepPlan(0, [], DecodeRows(pair.names, [1] * 5, [0] * 5, [()] * 5, [0] * 5, pair.params))
    assert pair.sampling.hosted(plan, range(5)) == [0, 1, 4]
    for name in pair.names:
        pair.sampling.forget(name)
    assert pair.sampling.hosted(plan, range(5)) == []
    assert pair.sampling.join(Join("new", PROMPT, 2, _params(presence_penalty=1.0), 0), 0)


def test_a_row_that_is_given_to_another_sequence_keeps_nothing() -> None:
    pair = Pair([_params(temperature=0.0, logit_bias={9: 100.0}, allowed_token_ids=(9, 10), presence_penalty=2.0)])
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    logits[0, 800] = 5.0
    assert pair.draw(0, logits, {})[0] == [9]
    pair.sampling.forget("s0")
    assert pair.sampling.join(Join("s0", PROMPT, 6, _params(temperature=0.0, logprobs=0), 0), pair.rows[0])
    assert pair.draw(0, logits, {})[0] == [800]


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[:1])
def test_warm_up_leaves_no_trace(dtype: torch.dtype) -> None:
    pair = Pair([_params(temperature=0.0, presence_penalty=2.0)])
    pair.sampling.warm_up(dtype)
    logits = torch.zeros(1, VOCAB, device=DEVICE)
    logits[0, 800], logits[0, 801] = 5.0, 4.0
    assert [pair.draw(position, logits, {})[0] for position in range(2)] == [[800], [801]]
