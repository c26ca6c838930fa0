"""Workloads: lists of requests with fixed token ids, drawn from a seed, so that all who run one do the same work.

For a seed a workload is the same token for token in every version of this file; tests hold the hashes. Token ids keep
out of the low 256, where special tokens live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

DEFAULT_VOCAB: Final = 151_936
_FIRST_ID, _MAX_VOCAB = 256, 100_000
_SIGMA: Final = 0.6  # of the log-normal lengths; their mean is exp(-sigma²/2) above the median
_MEAN_SHIFT: Final = 0.18


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: `prompt` as token ids or text, how many tokens to generate, when it comes (seconds from the start).

    `follows` is the index of the turn before: then `prompt` is only what the user adds, the conversation so far comes
    before it, and `arrival` counts from the end of that turn. `group` names requests that are reported apart.
    """

    prompt: Sequence[int] | str
    output_len: int
    arrival: float = 0.0
    follows: int | None = None
    group: str = ""


def random(n: int, input_len: int, output_len: int, vocab: int = DEFAULT_VOCAB, seed: int = 1) -> list[BenchRequest]:
    """`n` requests of one shape that share nothing."""
    rng = np.random.default_rng(seed)
    return [BenchRequest(draw_tokens(rng, input_len, vocab), output_len) for _ in range(n)]


def mixed(n: int = 512, vocab: int = DEFAULT_VOCAB, seed: int = 0) -> list[BenchRequest]:
    """Prompt and output lengths uniform in 100..1024, all at once: throughput."""
    rng = np.random.default_rng(seed)
    lengths: list[list[int]] = rng.integers(100, 1025, (n, 2)).tolist()
    return [BenchRequest(draw_tokens(rng, prompt, vocab), output) for prompt, output in lengths]


def shared_prefix(
    n: int = 256, prefix_len: int = 4096, unique_len: int = 128, output_len: int = 32,
    vocab: int = DEFAULT_VOCAB, seed: int = 2,
) -> list[BenchRequest]:
    """All prompts begin with the same `prefix_len` tokens."""
    rng = np.random.default_rng(seed)
    prefix = draw_tokens(rng, prefix_len, vocab)
    return [BenchRequest(prefix + draw_tokens(rng, unique_len, vocab), output_len) for _ in range(n)]


def poisson(
    rate: float, seconds: float = 20.0, mean_prompt: int = 1024, mean_output: int = 200,
    vocab: int = DEFAULT_VOCAB, seed: int = 3,
) -> list[BenchRequest]:
    """Poisson arrivals at `rate` per second for `seconds`, lengths log-normal with sigma 0.6."""
    rng = np.random.default_rng(seed)
    requests: list[BenchRequest] = []
    now = float(rng.exponential(1 / rate))
    while now < seconds:
        prompt_len = _log_normal(rng, mean_prompt, 16, 8192)
        output_len = _log_normal(rng, mean_output, 8, 1024)
        requests.append(BenchRequest(draw_tokens(rng, prompt_len, vocab), output_len, now))
        now += float(rng.exponential(1 / rate))
    return requests


def interference(
    streams: int = 64, stream_output: int = 768, long_prompt: int = 16_384, every: float = 0.5, count: int = 16,
    vocab: int = DEFAULT_VOCAB, seed: int = 4,
) -> list[BenchRequest]:
    """`streams` steady decodes from the start; after a second a long prompt lands every `every` seconds."""
    rng = np.random.default_rng(seed)
    steady = [BenchRequest(draw_tokens(rng, 256, vocab), stream_output, group="streams") for _ in range(streams)]
    return steady + [
        BenchRequest(draw_tokens(rng, long_prompt, vocab), 16, 1.0 + i * every, group="long prompts")
        for i in range(count)]


def multi_turn(
    conversations: int = 32, turns: int = 4, prefix_len: int = 512, user_len: int = 64, output_len: int = 64,
    think_s: float = 0.0, vocab: int = DEFAULT_VOCAB, seed: int = 5,
) -> list[BenchRequest]:
    """Conversations that share a system prefix; each turn repeats all before it, answers included, and adds to it.

    `think_s` passes between an answer and the next turn. The turns of a conversation stand one after the other.
    """
    rng = np.random.default_rng(seed)
    prefix = draw_tokens(rng, prefix_len, vocab)
    requests: list[BenchRequest] = []
    for _ in range(conversations):
        requests.append(BenchRequest(prefix + draw_tokens(rng, user_len, vocab), output_len, group="first turns"))
        for _ in range(turns - 1):
            requests.append(BenchRequest(
                draw_tokens(rng, user_len, vocab), output_len, think_s, len(requests) - 1, "later turns"))
    return requests


def draw_tokens(rng: np.random.Generator, count: int, vocab: int) -> list[int]:
    """`count` ids from 256 up, below `vocab` and 100,000."""
    drawn: list[int] = rng.integers(_FIRST_ID, min(vocab, _MAX_VOCAB), count).tolist()
    return drawn


def _log_normal(rng: np.random.Generator, mean: int, least: int, most: int) -> int:
    return int(np.clip(rng.lognormal(np.log(mean) - _MEAN_SHIFT, _SIGMA), least, most))
