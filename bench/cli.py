"""`shoal bench AREA`: a table, and with `--json FILE` the same figures for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.serve.command import serve

app = typer.Typer(no_args_is_help=True, help="Measure a part of shoal beside its peers.")

Quick = Annotated[bool, typer.Option("--quick", help="a smaller run of the same, at most 40 s on 2 cores")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")]


app.command()(serve)


@app.callback()
def areas() -> None:
    """Each area is a command of its own."""


@app.command()
def engine(
    quick: Quick = False, json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="model name or folder")] = "smollm2",
    threads: Annotated[int, typer.Option(min=1, help="torch threads")] = 1,
) -> None:
    """The engine without any RPC: rates, scheduling, prefix cache, structured output, beside limits and peers."""
    from bench.engine_area.measure import measure
    from bench.figures import report
    from stack.model_fetch import default_cache_dir, resolve_model

    figures = measure(resolve_model(model, default_cache_dir()), quick=quick, num_threads=threads)
    if not report("shoal bench engine", figures, json_file):
        raise typer.Exit(1)


@app.command()
def kv(quick: Quick = False, json_file: JsonFile = None) -> None:
    """Store put and get and KV hand-off by both transports, between real processes, beside a plain copy."""
    from bench.figures import report
    from bench.kv import measure

    if not report("shoal bench kv", measure(quick=quick), json_file):
        raise typer.Exit(1)


@app.command()
def pd(
    quick: Quick = False, json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="model name or folder")] = "smollm2",
) -> None:
    """CPU time of a prefill and a decode worker against one mixed worker, for the same requests."""
    from bench.figures import report
    from bench.pd import measure
    from stack.model_fetch import default_cache_dir, resolve_model

    if not report("shoal bench pd", measure(resolve_model(model, default_cache_dir()), quick=quick), json_file):
        raise typer.Exit(1)


@app.command()
def clients(
    quick: Quick = False, json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="model name or folder")] = "smollm2",
    install: Annotated[bool, typer.Option("--install", help="make the environments that are missing")] = False,
    only: Annotated[list[str] | None, typer.Option(help="guidellm or aiperf; default: both")] = None,
    folder: Annotated[Path | None, typer.Option(help="of the environments [~/.cache/shoal/bench-clients]")] = None,
) -> None:
    """The TTFT that guidellm, aiperf and `bench serve` see, beside the gateway's own histogram."""
    from bench.figures import report
    from bench.outside_clients import measure
    from stack.__main__ import one_line_errors
    from stack.model_fetch import default_cache_dir, resolve_model

    with one_line_errors():
        path = resolve_model(model, default_cache_dir())
        figures = measure(path, quick=quick, install=install, only=only or [], folder=folder)
        if not report("shoal bench clients", figures, json_file):
            raise typer.Exit(1)


@app.command()
def telemetry(
    quick: Quick = False, json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="model name or folder, for its tokenizer")] = "smollm2",
) -> None:
    """CPU time of a stack that is traced and scraped against one that is not."""
    from bench.figures import report
    from bench.telemetry import measure
    from stack.model_fetch import default_cache_dir, resolve_model

    if not report("shoal bench telemetry", measure(resolve_model(model, default_cache_dir()), quick=quick), json_file):
        raise typer.Exit(1)
