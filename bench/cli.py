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
    shape: Annotated[str, typer.Option(help="on a GPU, with random weights: qwen3-8b or qwen3-0.6b")] = "",
    workload: Annotated[list[str] | None, typer.Option(
        help="with --shape: decode, prefill, mixed, shared_prefix, structured, poisson, interference or all")] = None,
    check: Annotated[bool, typer.Option("--check", help="on a GPU: the model's tokens against the CPU's")] = False,
    device: Annotated[str, typer.Option(help="with --shape or --check: cuda or cuda:N")] = "cuda",
) -> None:
    """The engine without any RPC: rates, scheduling, prefix cache, structured output, beside limits and peers.

    With --shape: the engine on a GPU beside vLLM, by the same requests. With --check: whether a GPU computes the same.
    """
    from bench.engine_area.measure import measure
    from bench.figures import report

    if shape:
        _gpu_engine(shape, workload or ["all"], device, json_file)
        return
    if check:
        _gpu_check(model, device, threads, json_file)
        return
    from stack.model_fetch import default_cache_dir, resolve_model

    figures = measure(resolve_model(model, default_cache_dir()), quick=quick, num_threads=threads)
    if not report("shoal bench engine", figures, json_file):
        raise typer.Exit(1)


def _gpu_engine(shape: str, workloads: list[str], device: str, json_file: Path | None) -> None:
    from bench.figures import report
    from bench.gpu_engine.measure import measure
    from common import logs
    from stack.__main__ import one_line_errors

    with one_line_errors():
        logs.setup("bench", "", "info", "console")
        figures = measure(shape, workloads, device, logs.get(__name__).info)
    if not report(f"shoal bench engine --shape {shape}", figures, json_file):
        raise typer.Exit(1)


def _gpu_check(model: str, device: str, num_threads: int, json_file: Path | None) -> None:
    from bench.figures import report
    from bench.gpu_engine.gpu_equality import measure
    from common import logs
    from stack.__main__ import one_line_errors
    from stack.model_fetch import default_cache_dir, resolve_model

    with one_line_errors():
        logs.setup("bench", "", "info", "console")
        path = resolve_model(model, default_cache_dir())
        figures = measure(path, device, num_threads, logs.get(__name__).info)
    if not report(f"shoal bench engine --check, {path.name}", figures, json_file):
        raise typer.Exit(1)


@app.command()
def kernels(
    quick: Quick = False, json_file: JsonFile = None,
    shape: Annotated[str, typer.Option(help="qwen3-8b or qwen3-0.6b")] = "qwen3-8b",
    device: Annotated[str, typer.Option(help="cuda or cuda:N")] = "cuda",
) -> None:
    """Each GPU kernel beside its floor and a library's kernel, from CUDA graphs."""
    from bench.figures import report
    from stack.__main__ import one_line_errors

    with one_line_errors():
        from bench.kernels_area.graph_time import check_gpu

        check_gpu()  # before triton is imported, which need not be there
        from bench.kernels_area.measure import measure

        figures = measure(shape, device, quick=quick)
    if not report(f"shoal bench kernels --shape {shape}", figures, json_file):
        raise typer.Exit(1)


@app.command()
def gateway(
    quick: Quick = False, json_file: JsonFile = None,
    model: Annotated[str, typer.Option(help="model name or folder, for its tokenizer")] = "smollm2",
) -> None:
    """Gateway and tokenizer with a mock engine: streams beside a raw loop, cost of a token, requests, chat encoding."""
    from bench.figures import report
    from bench.gateway_area.measure import measure
    from stack.__main__ import one_line_errors
    from stack.model_fetch import default_cache_dir, resolve_model

    with one_line_errors():
        figures = measure(resolve_model(model, default_cache_dir()), quick=quick)
    if not report("shoal bench gateway", figures, json_file):
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
