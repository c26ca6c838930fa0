"""Requests of one token: how many a second, what each costs, and the latency that the way to the engine and back adds.

Each prompt is new, so that no cache knows it, and all have 256 tokens. The rate is that of a closed loop with enough
requests in flight. The latency is at half that rate, each request counted from when it was due; from its median the
mean time is taken that the worker had the request for itself, by the worker's own histogram.
"""

from __future__ import annotations

import os
import random
import statistics
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure
from bench.gateway_area.bench_stack import BenchStack, ask
from bench.gateway_area.client import Job, Result
from common.errors import InternalError
from common.text.model_tokenizer import ModelTokenizer
from stack.scrape import scrape

MIN_PER_S: Final = 1500.0
MAX_ADDED_MS: Final = 4.0
NUM_PROMPT_TOKENS: Final = 256
_SERVICES: Final = ("gateway", "tokenizer", "router", "mixed")
_IN_FLIGHT: Final = 64
_WORKER_S: Final = "shoal_worker_e2e_seconds"
_BODY: Final[dict[str, Any]] = {"max_tokens": 1, "ignore_eos": True}


def measure(stack: BenchStack, model_path: Path, *, quick: bool) -> list[Figure]:
    """`stack` has an engine that waits for nothing; `quick` sends fewer."""
    num_requests = 400 if quick else 6000
    prompts, pids = Prompts(ModelTokenizer.load(model_path)), stack.pids(*_SERVICES)

    def asked(num: int, rate: float = 0.0) -> Result:
        bodies = [{**_BODY, "model": stack.state.model, "prompt": prompts.draw()} for _ in range(num)]
        return ask(Job(stack.state.url, bodies, 4 * _IN_FLIGHT if rate else _IN_FLIGHT, rate=rate, watched=pids))

    asked(_IN_FLIGHT)
    full = asked(num_requests)
    before = _worker(stack)
    half = asked(num_requests // 2, rate=num_requests / full.seconds / 2)
    after = _worker(stack)
    return figures(full, half, (after[0] - before[0]) / max(1.0, after[1] - before[1]))


def figures(full: Result, half: Result, worker_s: float) -> list[Figure]:
    """`full` in a closed loop, `half` at half its rate, at which a worker took `worker_s` for a request."""
    num = len(full.latencies_s)
    per_s = num / full.seconds
    p50_ms = 1000 * statistics.median(half.latencies_s)
    added_ms = p50_ms - 1000 * worker_s
    name = f"{NUM_PROMPT_TOKENS} + 1 tokens"
    at_half = f"{name}, half the rate"
    return [
        Figure(f"{name}: rate", per_s, "requests/s", "least", MIN_PER_S, per_s / MIN_PER_S, 1.0),
        *(Figure(f"{name}: CPU of the {service}", 1e6 * seconds / num, "us a request")
          for service, seconds in full.cpu_s.items()),
        Figure(f"{at_half}: added latency, p50", added_ms, "ms", "limit", MAX_ADDED_MS, MAX_ADDED_MS / added_ms, 1.0),
        Figure(f"{at_half}: whole latency, p50", p50_ms, "ms", "of it in the worker", 1000 * worker_s),
        Figure(f"{at_half}: lag of the client, p99", half.lag_p99_ms, "ms"),
        Figure(f"{name}: load average beside it", os.getloadavg()[0], "processes"),
    ]


class Prompts:
    """Texts of so many tokens; no two begin alike."""

    def __init__(self, tokenizer: ModelTokenizer, seed: int = 0) -> None:
        self._tokenizer, self._draw = tokenizer, random.Random(seed)
        strings = map(tokenizer.token_string, range(tokenizer.vocab_size))
        known = [text[1:] for text in strings if len(text) > 3 and text[1:].isascii() and text[1:].isalpha()]
        self._words = [word for word in known if len(self._ids(f" {word}")) == 1]
        if not self._words:
            raise InternalError("the vocabulary has no word of one token")

    def draw(self) -> str:
        """Raises `InternalError` when the words are not a token each where they stand together."""
        text = "".join(f" {word}" for word in self._draw.choices(self._words, k=NUM_PROMPT_TOKENS))
        if (num := len(self._ids(text))) != NUM_PROMPT_TOKENS:
            raise InternalError(f"a prompt of {num} tokens")
        return text

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def _worker(stack: BenchStack) -> tuple[float, float]:
    """Seconds of all requests that it has ended, and their number."""
    found = scrape(stack.state.processes["mixed-0"].metrics_address)
    return found.get(f"{_WORKER_S}_sum", 0.0), found.get(f"{_WORKER_S}_count", 0.0)
