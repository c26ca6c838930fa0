"""Load generators of others against our stack: does the TTFT that they see agree with the one that we export?

Each runs in a virtual environment of its own, offline (its model hub is an address where nothing answers), at even gaps
and at most 30 % of what one request after the other would take. Beside each mean stands the mean of the gateway's
histogram over the same requests, the change of sum over the change of count; ours, `shoal bench serve`, is one of the
three.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.progress import Progress

from bench.client_environment import ClientEnvironment
from bench.figures import Figure
from bench.serve.options import CHAT, DatasetOptions, ServeOptions
from bench.serve.runner import measure as measure_serve
from common.errors import ConfigError, InternalError
from stack.model_fetch import default_cache_dir
from stack.scrape import scrape
from stack.stack_process import StackProcess

_PACKAGES: Final = {"guidellm": "guidellm==0.8.1", "aiperf": "aiperf==0.13.0"}
_INPUT, _OUTPUT = 32, 8  # tokens
_LOAD: Final = 0.3  # of the time, one request after the other
_START_S, _CLIENT_S = 120.0, 900.0
_NOWHERE: Final = "http://127.0.0.1:9"
_RATIO, _ABSOLUTE_MS = 0.1, 5.0  # what may lie between the two means, whichever is more


@dataclass(frozen=True, slots=True)
class Target:
    """The stack under load and how: `num` requests at `rate` per second."""

    url: str
    model: str
    tokenizer: Path
    num: int
    rate: float


@dataclass(frozen=True, slots=True)
class OutsideClient:
    """`arguments` after the program's name, writing into a folder; `mean` reads the TTFT in ms and the count there."""

    arguments: Callable[[Target, Path], list[str]]
    mean: Callable[[Path], tuple[float, int]]


def _guidellm_arguments(target: Target, folder: Path) -> list[str]:
    return ["run", "--backend", f"kind=openai_http,target={target.url},model={target.model}",
            "--profile", f"kind=constant,rate={target.rate:.4f}",
            "--constraint", f"kind=max_requests,count={target.num}",
            "--tokenizer", f"kind=hf_auto,model={target.tokenizer}",
            "--data", f"kind=synthetic_text,prompt_tokens={_INPUT},output_tokens={_OUTPUT}",
            "--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-progress"]


def _guidellm_mean(folder: Path) -> tuple[float, int]:
    found = _read(folder / "guidellm.json")["benchmarks"][0]["metrics"]["time_to_first_token_ms"]["successful"]
    return float(found["mean"]), int(found["count"])


def _aiperf_arguments(target: Target, folder: Path) -> list[str]:
    return ["profile", "--model", target.model, "--url", target.url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", str(target.tokenizer), "--isl", str(_INPUT), "--isl-stddev", "0", "--osl", str(_OUTPUT),
            "--osl-stddev", "0", "--extra-inputs", "ignore_eos:true", "--request-rate", f"{target.rate:.4f}",
            "--arrival-pattern", "constant", "--request-count", str(target.num), "--num-dataset-entries",
            str(target.num), "--random-seed", "1", "--ui-type", "none", "--no-server-metrics",
            "--output-artifact-dir", str(folder)]


def _aiperf_mean(folder: Path) -> tuple[float, int]:
    found = _read(folder / "profile_export_aiperf.json")["time_to_first_token"]
    return float(found["avg"]), int(found["count"])


CLIENTS: Final = {
    "guidellm": OutsideClient(_guidellm_arguments, _guidellm_mean),
    "aiperf": OutsideClient(_aiperf_arguments, _aiperf_mean),
}


def measure(model_path: Path, *, quick: bool, install: bool, only: list[str], folder: Path | None) -> list[Figure]:
    """`quick` sends fewer requests; `only`: names out of `CLIENTS`, empty for all; `folder`: of the environments.

    Raises `ConfigError` when a client is not there and `install` was not asked for.
    """
    home = folder or default_cache_dir() / "bench-clients"
    programs = {name: _program(home, name, install) for name in only or CLIENTS}
    made = []
    with _stack(model_path) as target, Progress(transient=True) as bar:
        task = bar.add_task("clients", total=1 + len(programs))
        target, mean_e2e_s = _at_light_load(replace(target, num=6 if quick else 20))
        made.append(Figure("load", target.rate * mean_e2e_s, "of one request after the other"))
        made.append(_compared("shoal bench serve", target, partial(_own_mean, target)))
        for name, program in programs.items():
            bar.advance(task)
            made.append(_compared(name, target, partial(_run, name, program, target)))
    return made


def agreement(name: str, mean_ms: float, exported_ms: float) -> Figure:
    """Its ratio is what may lie between the two means over what does."""
    allowed = max(_RATIO * exported_ms, _ABSOLUTE_MS)
    return Figure(f"TTFT mean, {name}", mean_ms, "ms", "gateway's histogram", exported_ms,
                  allowed / max(abs(mean_ms - exported_ms), 1e-3), 1.0)


def _compared(name: str, target: Target, run: Callable[[], tuple[float, int]]) -> Figure:
    before = scrape(target.url.removeprefix("http://"))
    mean_ms, count = run()
    after = scrape(target.url.removeprefix("http://"))
    total, seen = (after[f"shoal_gateway_ttft_seconds_{part}"] - before.get(f"shoal_gateway_ttft_seconds_{part}", 0.0)
                   for part in ("sum", "count"))
    if not count == seen == target.num:
        raise InternalError(f"{name} counts {count} requests of {target.num}, the gateway {seen:g}")
    return agreement(name, mean_ms, total / seen * 1000)


def _at_light_load(target: Target) -> tuple[Target, float]:
    """The target with its rate, and the mean time of one request, warm."""
    options = _options(target, float("inf"), 4)
    spread = measure_serve(replace(options, max_concurrency=1, num_warmups=2)).summary.spreads["e2el"]
    return replace(target, rate=_LOAD / (spread.mean / 1000)), spread.mean / 1000


def _own_mean(target: Target) -> tuple[float, int]:
    summary = measure_serve(_options(target, target.rate, target.num)).summary
    return summary.spreads["ttft"].mean, summary.completed


def _options(target: Target, rate: float, num: int) -> ServeOptions:
    dataset = DatasetOptions(num_prompts=num, input_len=_INPUT, output_len=_OUTPUT, seed=num)
    return ServeOptions(target.url, target.model, dataset, CHAT, request_rate=rate, burstiness=float("inf"),
                        ignore_eos=True, tokenizer=str(target.tokenizer))


def _run(name: str, program: Path, target: Target) -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix=f"shoal-{name}-", ignore_cleanup_errors=True) as folder:
        command = [str(program), *CLIENTS[name].arguments(target, Path(folder))]
        ended = subprocess.run(command, cwd=folder, env={**os.environ, "HF_ENDPOINT": _NOWHERE}, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_CLIENT_S, check=False)
        if ended.returncode:
            raise InternalError(f"{name} ended with {ended.returncode}: {ended.stdout[-2000:]}")
        return CLIENTS[name].mean(Path(folder))


def _program(home: Path, name: str, install: bool) -> Path:
    if name not in CLIENTS:
        raise ConfigError(f"--only: must be one of {', '.join(CLIENTS)}, got {name!r}", param="only")
    environment = ClientEnvironment(home / name, (_PACKAGES[name],))
    if not environment.is_made:
        if not install:
            raise ConfigError(f"{name} is not in {home}: add --install (it takes about 1 GB)", param="install")
        environment.make()
    return environment.program(name)


@contextmanager
def _stack(model_path: Path) -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as folder:
        process = StackProcess(Path(folder), ["--model", str(model_path), "--kvstore", "0", "--torch-threads", "1"])
        try:
            state = process.wait_ready(_START_S)
            yield Target(state.url, state.model, model_path, 0, 0.0)
        finally:
            process.stop()


def _read(path: Path) -> Any:
    return json.loads(path.read_text())
