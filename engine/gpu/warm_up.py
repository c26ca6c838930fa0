"""Plans that make the kernels of every kind of step be compiled before the first request comes.

A kernel is compiled anew for other powers of two of rows and, in part, for counts that are 1 or a multiple of 16; so
the plans go through these. Their sequences share blocks 0 and up of a pool that nobody uses yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common.sampling_params import SamplingParams
from engine.step import DecodeRows, Join, PlannedRow, Runner, StepPlan

_PLAIN = SamplingParams(max_tokens=4)
_OTHERS = (  # each is drawn in another way
    SamplingParams(max_tokens=4, temperature=0.0), SamplingParams(max_tokens=4, top_k=4, top_p=0.9),
    SamplingParams(max_tokens=4, logprobs=2, min_p=0.1, logit_bias={1: 1.0}),
    SamplingParams(max_tokens=4, frequency_penalty=0.5, repetition_penalty=1.1))
_SCORED = SamplingParams(max_tokens=4, prompt_logprobs=1)
_CHUNKS = (5, 64, 2500)  # tokens: within graphs, and beyond them


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Bounds of the steps that will run. `max_len`: tokens of a sequence for which there are blocks."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_len: int
    block_size: int


def warm_up(runner: Runner, sizes: StepSizes) -> None:
    """Run all plans; nothing of them stays."""
    for plan in (*_decode_plans(sizes), *_mixed_plans(sizes), *_sampling_plans(sizes), *_scoring_plans(sizes)):
        run(runner, plan)


def largest_step(sizes: StepSizes) -> StepPlan:
    """As many rows as may be, which use up the token budget."""
    num_rows = min(sizes.max_num_seqs, sizes.max_num_batched_tokens)
    return plan_of(sizes, 0, [min(sizes.max_num_batched_tokens // num_rows, sizes.max_len)] * num_rows)


def run(runner: Runner, plan: StepPlan) -> None:
    runner.launch(plan)
    runner.collect()
    for join in plan.joins:
        runner.forget(join.request_id)


def plan_of(
    sizes: StepSizes, num_decode: int, chunks: Sequence[int], params: SamplingParams = _PLAIN, *,
    scores_prompt: bool = False,
) -> StepPlan:
    """`num_decode` decode rows, then a chunk of each of so many tokens, all from position 0; all of them draw."""
    names = [f"warm-up-{i}" for i in range(num_decode + len(chunks))]
    decode = DecodeRows(
        names[:num_decode], [1] * num_decode, [0] * num_decode, [(0,)] * num_decode, [0] * num_decode,
        [params] * num_decode)
    rows = [PlannedRow(name, [1] * length, 0, tuple(range(-(-length // sizes.block_size))), True, 0, params,
                       scores_prompt) for name, length in zip(names[num_decode:], chunks, strict=True)]
    joins = [Join(name, [1] * length, length, params, 0)
             for name, length in zip(names, [*([1] * num_decode), *chunks], strict=True)]
    return StepPlan(1, rows, decode, joins)


def _decode_plans(sizes: StepSizes) -> Iterator[StepPlan]:
    for num_rows in _counts(sizes.max_num_seqs):
        yield plan_of(sizes, num_rows, [])


def _mixed_plans(sizes: StepSizes) -> Iterator[StepPlan]:
    for num_decode in [0, *_counts(sizes.max_num_seqs - 1)]:
        for length in _CHUNKS:
            left = sizes.max_num_batched_tokens - num_decode
            if left > 0:
                yield plan_of(sizes, num_decode, [min(length, left, sizes.max_len)])


def _sampling_plans(sizes: StepSizes) -> Iterator[StepPlan]:
    for params in _OTHERS:
        for num_rows in sorted({min(num, sizes.max_num_seqs) for num in (1, 3, 16)}):
            yield plan_of(sizes, num_rows, [], params)


def _scoring_plans(sizes: StepSizes) -> Iterator[StepPlan]:
    for length in _CHUNKS[:2]:
        length = min(length, sizes.max_num_batched_tokens, sizes.max_len)
        if length > 1:
            yield plan_of(sizes, 0, [length], _SCORED, scores_prompt=True)


def _counts(limit: int) -> list[int]:
    """1 .. `limit`: the powers of two and what comes before them."""
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]
    return sorted({num for power in [*powers, limit] for num in (power - 1, power) if num > 0})
