"""`shoal bench AREA`: a table, and with `--json FILE` the same figures for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Measure a part of shoal beside its peers.")

Quick = Annotated[bool, typer.Option("--quick", help="a smaller run of the same, at most 40 s on 2 cores")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")]


@app.callback()
def areas() -> None:
    """Each area is a command of its own."""


@app.command()
def engine(
    quick: Quick = False, json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="model name or folder")] = "smollm2",
    threads: Annotated[int, typer.Option(min=1, help="torch threads")] = 1,
) -> None:
    """Decode rate of one request and of many, and the prompt rate, without any RPC."""
    from bench.engine import measure
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
