"""The requests of a run, from its options."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Final

from bench.serve import workloads
from bench.serve.arrivals import spread
from bench.serve.options import DatasetOptions, ServeOptions
from bench.serve.trace_file import read_custom, read_timed
from bench.serve.workloads import DEFAULT_VOCAB, BenchRequest
from common.errors import ConfigError
from stack.model_fetch import default_cache_dir

# The seed of each workload where none is given.
_SEEDS: Final = {"mixed": 0, "random": 1, "shared_prefix": 2, "poisson": 3, "interference": 4, "multi_turn": 5}
_MANY: Final = 100


def build(options: ServeOptions) -> list[BenchRequest]:
    """In the order they are sent, as far as the workload and the rate say it. Raises `ConfigError` when none is."""
    asked = options.dataset
    requests = _requests(asked, options.request_rate)
    if not requests:
        raise ConfigError(f"--duration-s {asked.duration_s:g}: no request arrives in it", param="duration_s")
    if options.has_own_arrivals:
        return requests
    return spread(requests, options.request_rate, options.burstiness, asked.seed or 0)


def vocabulary(given: int, tokenizer: str, model: str) -> int:
    """`given`, else what the tokenizer's folder, or shoal's own folder of that model, says; else 151,936.

    Raises `ConfigError` when `tokenizer` is not such a folder.
    """
    if given:
        return given
    folder = Path(tokenizer) if tokenizer else default_cache_dir() / Path(model).name
    try:
        return int(json.loads((folder / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        if tokenizer:
            raise ConfigError(
                f"--tokenizer {tokenizer}: no folder with a config.json that has vocab_size", param="tokenizer"
            ) from None
        return DEFAULT_VOCAB


def by_conversation(requests: list[BenchRequest]) -> list[list[int]]:
    """Indices of each conversation's turns in order; a request without others is one alone."""
    roots: list[int] = []
    for index, request in enumerate(requests):
        roots.append(index if request.follows is None else roots[request.follows])
    order = sorted(range(len(requests)), key=lambda index: (roots[index], index))
    return [list(turns) for _, turns in groupby(order, key=roots.__getitem__)]


def _requests(asked: DatasetOptions, rate: float) -> list[BenchRequest]:
    n, vocab = asked.num_prompts, asked.vocab_size or DEFAULT_VOCAB
    seed = _SEEDS.get(asked.name, 0) if asked.seed is None else asked.seed
    match asked.name:
        case "random":
            return workloads.random(n or _MANY, asked.input_len or 1024, asked.output_len or 128, vocab, seed)
        case "mixed":
            return workloads.mixed(n or 512, vocab, seed)
        case "shared_prefix":
            return workloads.shared_prefix(
                n or 256, asked.prefix_len or 4096, asked.input_len or 128, asked.output_len or 32, vocab, seed)
        case "poisson":
            return workloads.poisson(
                rate, asked.duration_s, asked.input_len or 1024, asked.output_len or 200, vocab, seed)[:n]
        case "interference":
            return workloads.interference(
                asked.num_streams, asked.output_len or 768, asked.input_len or 16_384, asked.long_prompt_every_s,
                n or 16, vocab, seed)
        case "multi_turn":
            return workloads.multi_turn(
                n or 32, asked.num_turns, asked.prefix_len or 512, asked.input_len or 64, asked.output_len or 64,
                asked.think_s, vocab, seed)
        case "custom":
            assert asked.path is not None
            return read_custom(asked.path, n, asked.output_len)
        case _:
            assert asked.path is not None
            return read_timed(asked.path, n, vocab, seed)
