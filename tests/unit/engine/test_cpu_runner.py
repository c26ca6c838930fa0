from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from common.errors import ConfigError, InternalError
from common.generation import TokenLogprobs
from common.sampling_params import SamplingParams
from engine import cpu_runner
from engine.config import EngineConfig
from engine.cpu_runner import TorchRunner
from engine.runner_loading import load_runner
from engine.step import UNKNOWN_TOKEN, BlockCopy, DecodeRows, Join, Runner, StepPlan
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


@pytest.mark.parametrize(("param", "argument"), [("dtype", {"dtype": "int4"}), ("num_threads", {"num_threads": 0})])
def test_a_bad_argument_is_refused_by_name(tmp_path: Path, param: str, argument: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_runner(tiny_llama(tmp_path), CONFIG, **argument)  # type: ignore[arg-type]
    assert refusal.value.param == param


def test_a_context_beyond_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"513.*512"):
        load_runner(tiny_llama(tmp_path), EngineConfig(max_model_len=513))


def test_torch_keeps_to_the_threads_it_was_given(runner: TorchRunner) -> None:
    assert torch.get_num_threads() == 1


PENALIZED = dataclasses.replace(
    SEEDED, frequency_penalty=0.9, presence_penalty=0.4, repetition_penalty=1.3, bad_words=((7,), (33, 7)), logprobs=3)


class Sequence:
    """One request on blocks of its own, stepped by hand."""

    def __init__(self, runner: TorchRunner, params: SamplingParams, name: str = "s", first_block: int = 0) -> None:
        self.runner, self.params, self.name = runner, params, name
        self.blocks = list(range(first_block, first_block + 16))
        self.known = list(PROMPT)
        self.num_steps = self.num_computed = 0
        self.logprobs: list[TokenLogprobs] = []

    @property
    def outputs(self) -> list[int]:
        return self.known[len(PROMPT) :]

    def join(self) -> Join:
        return Join(self.name, list(self.known), len(PROMPT), self.params, 0)

    def step(self, *, joins: bool = False, size: int = 1000) -> None:
        """Compute up to `size` of what is known; draw if that is all."""
        start, self.num_steps = self.num_computed, self.num_steps + 1
        end = min(len(self.known), start + size)
        samples = end == len(self.known)
        row = planned_row(self.known[start:end], self.blocks, start=start, samples=samples, params=self.params,
                          output_position=len(self.outputs), request_id=self.name)
        result = computed(self.runner, StepPlan(self.num_steps, [row], joins=[self.join()] if joins else []))
        self.num_computed = end
        token = result.token_ids[0]
        assert samples == (token is not None)
        if token is not None:
            self.known.append(token)
            self.logprobs += result.logprobs.values()

    def run(self, num_tokens: int) -> Sequence:
        self.step(joins=True)
        while len(self.outputs) < num_tokens:
            self.step()
        return self


def test_penalties_count_each_token_once_chunked_preempted_or_straight(runner: TorchRunner) -> None:
    straight = Sequence(runner, PENALIZED, "straight").run(20)
    chunked = Sequence(runner, PENALIZED, "chunked", 16)
    chunked.step(joins=True, size=2)
    while len(chunked.outputs) < 20:
        chunked.step(size=2)
    preempted = Sequence(runner, PENALIZED, "preempted", 32).run(9)
    runner.forget("preempted")
    preempted.num_computed = 0
    preempted.step(joins=True, size=8)  # prompt and some outputs, all joined as known
    while len(preempted.outputs) < 20:
        preempted.step(size=3)
    assert chunked.outputs == straight.outputs
    assert preempted.outputs == straight.outputs
    for one, other in zip(chunked.logprobs, straight.logprobs, strict=True):
        assert one.top_token_ids == other.top_token_ids
        assert (one.logprob, *one.top_logprobs) == pytest.approx((other.logprob, *other.top_logprobs), abs=1e-4)
    assert Sequence(runner, SEEDED, "free", 48).run(20).outputs != straight.outputs


def test_tokens_that_a_row_brings_count_like_those_that_were_drawn(runner: TorchRunner) -> None:
    drawn = Sequence(runner, PENALIZED, "drawn").run(20)
    forced = Sequence(runner, PENALIZED, "forced", 16).run(5)
    forced.known += drawn.outputs[5:12]  # a forced run, computed as one chunk
    while len(forced.outputs) < 20:
        forced.step()
    assert forced.outputs == drawn.outputs


def test_nothing_is_left_of_forgotten_sequences_but_what_a_launched_plan_needs(runner: TorchRunner) -> None:
    wanted = Sequence(runner, PENALIZED, "c", 16).run(4).outputs[3]
    sequences = [Sequence(runner, params, name).run(3) for params, name in ((PENALIZED, "a"), (SEEDED, "b"))]
    assert runner.num_sequences == 3
    first, second = (
        StepPlan(step, [planned_row(
            [UNKNOWN_TOKEN], sequences[0].blocks, start=len(PROMPT) + 2 + place, params=PENALIZED, request_id="a",
            output_position=3 + place)]) for place, step in enumerate((77, 78)))
    runner.launch(first)
    runner.launch(second)
    runner.forget("a")
    runner.forget("b")
    assert runner.collect().token_ids == [wanted]
    runner.collect()
    runner.forget("c")
    assert runner.num_sequences == 0


def test_a_plan_that_was_launched_before_the_tokens_were_known_takes_those_that_it_drew(runner: TorchRunner) -> None:
    params = [PENALIZED, SEEDED, dataclasses.replace(PENALIZED, temperature=0.0)]
    wanted = [Sequence(runner, p, f"one {i}", 16 * i).run(8).outputs for i, p in enumerate(params)]
    sequences = [Sequence(runner, p, f"r{i}", 16 * i) for i, p in enumerate(params)]
    first = StepPlan(0, [planned_row(PROMPT, s.blocks, params=s.params, request_id=s.name) for s in sequences],
                     joins=[s.join() for s in sequences])
    names = [s.name for s in sequences]

    def decode(step: int) -> StepPlan:
        return StepPlan(step, [], DecodeRows(
            names, [UNKNOWN_TOKEN] * 3, [len(PROMPT) + step - 1] * 3, [s.blocks for s in sequences], [step] * 3,
            params))

    runner.launch(first)
    results = []
    for step in range(1, 8):
        runner.launch(decode(step))
        results.append(runner.collect().token_ids)
    results.append(runner.collect().token_ids)
    assert [list(tokens) for tokens in zip(*results, strict=True)] == wanted


def test_an_unknown_token_of_a_sequence_that_drew_none_is_an_error(runner: TorchRunner) -> None:
    with pytest.raises(InternalError, match="none was drawn"):
        computed(runner, StepPlan(1, [planned_row([UNKNOWN_TOKEN], [0])]))


def test_blocks_are_copied_before_the_step_reads_them(runner: TorchRunner) -> None:
    original = Sequence(runner, SEEDED, "original").run(3)
    copies = [BlockCopy(0, 40), BlockCopy(1, 41)]
    row = planned_row(original.known[-2:-1], [40, 41, 42], start=len(original.known) - 2, params=SEEDED,
                      output_position=2, request_id="copy")
    assert computed(runner, StepPlan(9, [row], copies=copies)).token_ids == original.outputs[-1:]


def test_masks_are_waited_for_after_the_forward_pass_and_hold_the_row_they_name(runner: TorchRunner) -> None:
    class Masks:
        def wait(self) -> Mapping[int, np.ndarray]:
            words = np.zeros(8, np.uint32)
            words[3] = 1 << 5
            return {1: words}

    rows = [planned_row(PROMPT, [4 * i, 4 * i + 1], params=SEEDED, request_id=f"r{i}") for i in range(3)]
    free = computed(runner, StepPlan(1, rows)).token_ids
    masked = computed(runner, StepPlan(2, rows, masks=Masks())).token_ids
    assert masked == [free[0], 3 * 32 + 5, free[2]]


def test_logprobs_of_outputs_and_prompt_are_those_of_transformers_in_chunks_and_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama(tmp_path, 1)
    runner, params = load_runner(folder, CONFIG), dataclasses.replace(PENALIZED, prompt_logprobs=2)
    with torch.inference_mode():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        exact = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].double(), -1).numpy()
    for chunk, slice_logits in ((5, 1 << 22), (2, 1 << 22), (5, 256), (5, 600)):
        monkeypatch.setattr(cpu_runner, "_SCORED_LOGITS", slice_logits)
        scores, drawn = [], None
        for start in range(0, len(PROMPT), chunk):
            tokens = PROMPT[start : start + chunk]
            is_last = start + chunk >= len(PROMPT)
            row = planned_row(tokens, [0, 1], start=start, samples=is_last, params=params)._replace(scores_prompt=True)
            joins = [Join("r", PROMPT, len(PROMPT), params, 0)] if start == 0 else []
            result = computed(runner, StepPlan(start, [row], joins=joins))
            scores += result.prompt_logprobs[0]
            drawn = (result.token_ids[0], result.logprobs.get(0))
        assert [s.logprob for s in scores] == pytest.approx([exact[i, t] for i, t in enumerate(PROMPT[1:])], abs=1e-4)
        assert [s.top_token_ids for s in scores] == [tuple(np.argsort(-exact[i])[:2]) for i in range(4)]
        token, logprobs = drawn or (None, None)
        assert token is not None
        assert logprobs is not None
        assert logprobs.logprob == pytest.approx(exact[-1, token], abs=1e-4)
        assert logprobs.top_logprobs == pytest.approx(sorted(exact[-1])[:-4:-1], abs=1e-4)


@pytest.mark.parametrize("penalty", [0.6, 1.5])
def test_repetition_is_penalized_as_transformers_generates(tmp_path: Path, penalty: float) -> None:
    folder = tiny_llama(tmp_path, 1)
    params = SamplingParams(max_tokens=24, temperature=0.0, repetition_penalty=penalty)
    with torch.inference_mode():
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, do_sample=False, eos_token_id=None,
                                pad_token_id=0, repetition_penalty=penalty)[0, len(PROMPT) :].tolist()
    assert Sequence(load_runner(folder, CONFIG), params).run(24).outputs == wanted
