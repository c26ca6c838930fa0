from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.sampling_params import SamplingParams
from engine.config import EngineConfig
from engine.cpu_runner import TorchRunner, load_runner
from engine.step import Runner, StepPlan
from tests.factories import computed, planned_row, tiny_llama

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=128)
SEEDED = SamplingParams(max_tokens=16, temperature=0.8, top_p=0.95, seed=42)
PROMPT = [5, 80, 200, 33, 7]


@pytest.fixture
def runner(tmp_path: Path) -> TorchRunner:
    return load_runner(tiny_llama(tmp_path, 1, eos_token_id=[2, 3]), CONFIG)


def _generate(runner: TorchRunner, params: list[SamplingParams], num_tokens: int) -> list[list[int]]:
    """Requests with the same prompt, each in blocks of its own, stepped together."""
    tables = [list(range(8 * i, 8 * i + 8)) for i in range(len(params))]
    tokens: list[list[int]] = [list(PROMPT) for _ in params]
    for step in range(num_tokens):
        start = len(PROMPT) + step - 1 if step else 0
        result = computed(runner, StepPlan(step, [
            planned_row(t[start:], b, start=start, output_position=step, params=p)
            for t, b, p in zip(tokens, tables, params, strict=True)]))
        assert result.step_id == step
        for sequence, token in zip(tokens, result.token_ids, strict=True):
            assert token is not None
            sequence.append(token)
    return [t[len(PROMPT) :] for t in tokens]


def test_it_is_a_runner_and_says_what_the_model_is(runner: TorchRunner) -> None:
    as_runner: Runner = runner
    assert as_runner.vocab_size == 256
    assert as_runner.eos_token_ids == {2, 3}


def test_a_seeded_request_draws_the_same_tokens_alone_and_beside_any_others(runner: TorchRunner) -> None:
    [alone] = _generate(runner, [SEEDED], 16)
    greedy, other_seed = dataclasses.replace(SEEDED, temperature=0.0), dataclasses.replace(SEEDED, seed=7)
    for others in ([other_seed], [SEEDED], [greedy, other_seed], [other_seed] * 7):
        assert _generate(runner, [*others, SEEDED], 16)[-1] == alone
    assert _generate(runner, [other_seed], 16) != [alone]


def test_a_row_that_does_not_sample_yields_none(runner: TorchRunner) -> None:
    result = computed(runner, StepPlan(9, [planned_row(PROMPT, [0, 1], samples=False), planned_row(PROMPT, [2, 3])]))
    assert result.token_ids[0] is None
    assert result.token_ids[1] is not None
    assert computed(runner, StepPlan(10, [planned_row([1], [5], samples=False)])).token_ids == [None]


def test_an_empty_plan_yields_an_empty_result(runner: TorchRunner) -> None:
    assert list(computed(runner, StepPlan(3, [])).token_ids) == []


def test_the_last_block_of_the_pool_is_as_good_as_any(runner: TorchRunner) -> None:
    first = computed(runner, StepPlan(1, [planned_row(PROMPT, [0, 1])])).token_ids
    assert computed(runner, StepPlan(2, [planned_row(PROMPT, [63, 62])])).token_ids == first
    assert bool((runner.cache.blocks[63] != 0).any())


def test_blocks_copied_through_their_views_serve_another_table(runner: TorchRunner) -> None:
    tokens = [(7 * i) % 64 for i in range(9)]
    computed(runner, StepPlan(1, [planned_row(tokens[:8], (0, 1), samples=False)]))
    row = planned_row(tokens[8:], (0, 1, 2), start=8)
    wanted = runner.logits(StepPlan(2, [row]))[1].clone()
    for source, target in ((0, 5), (1, 4)):
        runner.block_view(target)[:] = runner.block_view(source)
    assert runner.block_bytes == len(runner.block_view(0))
    moved = runner.logits(StepPlan(3, [planned_row(tokens[8:], (5, 4, 3), start=8)]))[1]
    assert torch.equal(moved, wanted)


@pytest.mark.parametrize("token_id", [-1, 256])
def test_a_token_outside_the_vocabulary_is_an_error_not_another_token(runner: TorchRunner, token_id: int) -> None:
    with pytest.raises(IndexError):
        computed(runner, StepPlan(1, [planned_row([5, token_id], [0])]))


def test_no_gradient_state_is_kept(runner: TorchRunner) -> None:
    _, logits = runner.logits(StepPlan(1, [planned_row(PROMPT, [0, 1])]))
    assert not logits.requires_grad
    assert logits.grad_fn is None


def test_kv_cache_bytes_sets_the_number_of_blocks(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    block = 2 * 2 * 2 * 4 * 16 * 4  # layers, K and V, heads, slots, head_dim, float32
    assert load_runner(folder, CONFIG).num_blocks == 64
    assert load_runner(folder, CONFIG, kv_cache_bytes=10 * block + 1).num_blocks == 10
    with pytest.raises(ConfigError, match=f"one block of {block} bytes, got {block - 1}"):
        load_runner(folder, CONFIG, kv_cache_bytes=block - 1)


@pytest.mark.parametrize(("param", "argument"), [("dtype", {"dtype": "int4"}), ("device", {"device": "cuda"}),
                                                 ("num_threads", {"num_threads": 0})])
def test_a_bad_argument_is_refused_by_name(tmp_path: Path, param: str, argument: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_runner(tiny_llama(tmp_path), CONFIG, **argument)  # type: ignore[arg-type]
    assert refusal.value.param == param


def test_a_context_beyond_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"513.*512"):
        load_runner(tiny_llama(tmp_path), EngineConfig(max_model_len=513))


def test_torch_keeps_to_the_threads_it_was_given(runner: TorchRunner) -> None:
    assert torch.get_num_threads() == 1
