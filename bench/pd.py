"""What disaggregation costs: a prefill and a decode worker against one mixed worker, in CPU time for the same requests.

Two whole stacks with the real model, one torch thread per worker and no store, answer the same prompts in turn, new to
every cache each time. A figure is the median over the pairs of what a stack's workers used, user and system. One
prompt after the other is the cost of the hand-off itself. All at once also shows how the two batch: a mixed worker ends
all prompts before it decodes them together, a decode worker begins with the first that lands, so it takes more steps.
"""

from __future__ import annotations

import secrets
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil
from rich.progress import Progress

from bench.figures import Figure
from common.errors import InternalError
from stack.api_client import ApiClient, error_message
from stack.scrape import scrape
from stack.stack_process import StackProcess

_OUTPUT_TOKENS: Final = 24
_PROMPT_WORDS: Final = 270  # about 300 tokens
_MUST: Final = 1 / 1.2  # at most 20 % more than the mixed worker
_START_S: Final = 120.0
_HAND_OFF: Final = {"SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "16", "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000"}
_SENTENCE: Final = (
    "the harbour lights were counted twice each night because every captain wanted to know how many of them had burned "
    "until morning and who had paid for the oil")


def measure(model_path: Path, *, quick: bool) -> list[Figure]:
    """`quick` takes fewer pairs of a single prompt, so nothing at once."""
    num_pairs, num_prompts = (3, 1) if quick else (10, 2)
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True))
        apart = opened.enter_context(_Stack(Path(folder, "apart"), model_path, {"prefill": 1, "decode": 1}))
        mixed = opened.enter_context(_Stack(Path(folder, "mixed"), model_path, {"mixed": 1}))
        bar = opened.enter_context(Progress(transient=True))
        loads = [(1, num_prompts)] if quick else [(1, num_prompts), (num_prompts, num_prompts)]
        task = bar.add_task("pd", total=num_pairs * len(loads))
        _pair(apart, mixed, 1, 1)
        used: dict[int, list[tuple[float, float]]] = {at_once: [] for at_once, _ in loads}
        for turn in range(num_pairs):
            for at_once, num in loads:
                order = (apart, mixed) if turn % 2 else (mixed, apart)  # in turn the first
                seconds = dict(zip(order, _pair(*order, at_once, num), strict=True))
                used[at_once].append((seconds[apart], seconds[mixed]))
                bar.advance(task)
        whole = apart.whole_hand_offs(num_pairs * sum(num for _, num in loads))
    return [*figures(used), Figure("hand-offs that brought the whole prompt", whole, "of 1")]


def figures(used: dict[int, list[tuple[float, float]]]) -> list[Figure]:
    """From the CPU seconds of each pair, (prefill and decode worker, mixed worker), by how many prompts ran at once."""
    made = []
    for at_once, pairs in used.items():
        apart, mixed = (statistics.median(column) for column in zip(*pairs, strict=True))
        made.append(Figure(f"prefill + decode worker, {at_once} at once", apart, "CPU s", "mixed worker", mixed,
                           mixed / apart, _MUST if at_once == 1 else None))
    return made


def _pair(first: _Stack, second: _Stack, at_once: int, num_prompts: int) -> tuple[float, float]:
    salt = secrets.token_hex(4)
    seconds = first.answer(salt, at_once, num_prompts), second.answer(salt, at_once, num_prompts)
    if first.texts != second.texts:
        raise InternalError("the two stacks answered differently")
    return seconds


class _Stack:
    """A stack of its own, its workers, and what it answered last."""

    def __init__(self, state_dir: Path, model_path: Path, workers: dict[str, int]) -> None:
        self._names = [f"{role}-0" for role in workers]
        flags = {**workers, "kvstore": 0, "torch-threads": 1, "model": model_path}
        self._process = StackProcess(
            state_dir, [part for name, value in flags.items() for part in (f"--{name}", str(value))], _HAND_OFF)
        self.texts: list[str] = []

    def __enter__(self) -> _Stack:
        try:
            self._state = self._process.wait_ready(_START_S)
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stop()

    def answer(self, salt: str, at_once: int, num_prompts: int) -> float:
        """CPU seconds that the workers used while the prompts were answered."""
        before = self._cpu_s()
        with ApiClient(self._state.url) as api, ThreadPoolExecutor(at_once) as threads:
            self.texts = list(threads.map(lambda number: self._complete(api, salt, number), range(num_prompts)))
        return self._cpu_s() - before

    def whole_hand_offs(self, num_prompts: int) -> float:
        """The part that did not end early. Raises `InternalError` when not all prompts were handed off at all."""
        found = scrape(self._state.processes["decode-0"].metrics_address)
        begun = found.get("shoal_kv_transfers_total", 0)
        if begun < num_prompts:
            raise InternalError(f"{begun:g} of {num_prompts} prompts were handed off")
        return 1 - found["shoal_kv_transfer_fallbacks_total"] / begun

    def _complete(self, api: ApiClient, salt: str, number: int) -> str:
        known = _SENTENCE.split()
        words = [known[(number + i * i) % len(known)] for i in range(_PROMPT_WORDS)]
        status, answer = api.call("POST", "/v1/completions", {
            "model": self._state.model, "prompt": f"{salt} {number} {' '.join(words)}", "temperature": 0,
            "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True})
        if status != 200:
            raise InternalError(f"status {status}: {error_message(answer)}")
        text: str = answer["choices"][0]["text"]
        return text

    def _cpu_s(self) -> float:
        times = [psutil.Process(self._state.processes[name].pid).cpu_times() for name in self._names]
        return sum(t.user + t.system for t in times)
