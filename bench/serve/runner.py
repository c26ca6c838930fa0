"""One run from its options to its report: warm up, load with a progress bar, figures, files, picture."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.figures import write
from bench.serve import workloads
from bench.serve.connection import Endpoint
from bench.serve.dataset import build, vocabulary
from bench.serve.lag import ClientLag, client_lag
from bench.serve.load import Load
from bench.serve.options import ServeOptions
from bench.serve.plot import plot, require_matplotlib
from bench.serve.prompts import Prompts
from bench.serve.record import Outcome, RequestRecord
from bench.serve.report import figures, print_outcomes, print_tables
from bench.serve.result import result
from bench.serve.summary import Summary, summarize
from bench.serve.workloads import BenchRequest
from common.errors import Unavailable

INTERRUPTED: Final = "interrupted (Ctrl-C)"
_WARMUP_SEED: Final = 10_007  # so that a warm-up leaves no measured prompt in a cache


@dataclass(frozen=True, slots=True)
class Files:
    """Where to write; None: not at all. `detailed`: one entry a request in `result`."""

    figures: Path | None = None
    result: Path | None = None
    plot: Path | None = None
    detailed: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """`groups` only where the workload has more than one."""

    records: Sequence[RequestRecord]
    summary: Summary
    groups: dict[str, Summary]
    lag: ClientLag
    stopped_by: str


def run(options: ServeOptions, files: Files) -> int:
    """The exit code: 0, 1 when no request completed, 130 after Ctrl-C; the report is made in each case."""
    if files.plot is not None:
        require_matplotlib()
    measured = measure(options)
    console = Console()
    title = f"{options.dataset.name}, {options.model}"
    print_tables(console, f"shoal bench serve: {title}", measured.summary, measured.groups, measured.lag)
    print_outcomes(console, measured.summary, measured.records, measured.lag, measured.stopped_by)
    if files.figures is not None:
        write(figures(measured.summary, measured.groups, measured.lag), files.figures)
    if files.result is not None:
        body = result(options, measured.records, measured.summary, measured.groups, measured.lag,
                      measured.stopped_by, detailed=files.detailed)
        files.result.write_bytes(orjson.dumps(body, option=orjson.OPT_INDENT_2) + b"\n")
    if files.plot is not None:
        plot(files.plot, f"{title}, {len(measured.records)} requests", measured.records)
    if measured.stopped_by == INTERRUPTED:
        return 130
    return 0 if measured.summary.completed else 1


def measure(options: ServeOptions) -> Measured:
    """Run the load in an event loop of its own. Raises `ConfigError` before anything is sent."""
    vocab = vocabulary(options.dataset.vocab_size, options.tokenizer, options.model)
    options = replace(options, dataset=replace(options.dataset, vocab_size=vocab))
    requests = build(options)
    endpoint = Endpoint(options.url, options.api_key)
    prompts = Prompts(options, endpoint, requests)
    load = uvloop.run(_loaded(options, endpoint, requests, prompts))
    names = {record.group for record in load.records}
    groups = {name: [r for r in load.records if r.group == name] for name in sorted(names)} if len(names) > 1 else {}
    spread = {name: summarize(members, load.duration_s, options.percentiles, options.goodput)
              for name, members in groups.items()}
    return Measured(
        load.records, summarize(load.records, load.duration_s, options.percentiles, options.goodput), spread,
        client_lag(load.records, load.loop_delay, options.lag_limit_ms, has_rate=options.has_rate), load.stopped_by)


async def _loaded(
    options: ServeOptions, endpoint: Endpoint, requests: list[BenchRequest], prompts: Prompts
) -> Load:
    try:
        await _warm_up(options, endpoint, requests)
        with _Shown(len(requests)) as shown:
            load = Load(options, endpoint, requests, prompts, shown.on_done)
            gc.collect()
            gc.freeze()  # so that no collection walks all prompts while it is measured
            with _stopped_by_ctrl_c(load):
                await load.run()
        return load
    finally:
        endpoint.close()


async def _warm_up(options: ServeOptions, endpoint: Endpoint, requests: list[BenchRequest]) -> None:
    """Raises `Unavailable` when one fails: the run would too."""
    if not options.num_warmups:
        return
    like = requests[0]
    if isinstance(like.prompt, str):
        warmups = [replace(like, arrival=0.0)] * options.num_warmups
    else:
        warmups = workloads.random(
            options.num_warmups, len(like.prompt), like.output_len, options.dataset.vocab_size, _WARMUP_SEED)
    load = Load(options, endpoint, warmups, Prompts(options, endpoint, warmups))
    await load.run()
    for record in load.records:
        if record.outcome is not Outcome.COMPLETED:
            raise Unavailable(f"a warm-up request was {record.outcome.value}: {record.error}")


@contextmanager
def _stopped_by_ctrl_c(load: Load) -> Iterator[None]:
    """The first Ctrl-C ends the run and keeps its results; a second one ends the command."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        load.stop(INTERRUPTED)

    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Shown:
    """A progress bar on a terminal, one line at the end elsewhere; both on stderr."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._completed = total, 0, 0
        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[others]}"),
                   TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4,
                             disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("requests", total=total, others="")

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bar.stop()
        if self._bar.disable:
            print(f"{self._completed} of {self._total} requests completed", file=sys.stderr, flush=True)

    def on_done(self, record: RequestRecord) -> None:
        self._done += 1
        self._completed += record.outcome is Outcome.COMPLETED
        others = self._done - self._completed
        self._bar.update(self._task, completed=self._done, others=f"{others} not completed" if others else "")
