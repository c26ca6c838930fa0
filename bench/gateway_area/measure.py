"""All figures of the gateway and its tokenizer, part by part."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from bench.figures import Figure
from bench.gateway_area import chat_encoding, requests, streaming
from bench.gateway_area.bench_stack import BenchStack


def measure(model_path: Path, *, quick: bool) -> list[Figure]:
    """`quick` takes fewer rounds, tokens and streams."""
    found: list[Figure] = []
    with Progress(transient=True) as bar:
        task = bar.add_task("gateway", total=4)
        with BenchStack(model_path) as stack:
            found += streaming.at_full_speed(stack, quick=quick)
            bar.advance(task)
            found += requests.measure(stack, model_path, quick=quick)
            bar.advance(task)
        found += streaming.at_pace(model_path, quick=quick)
        bar.advance(task)
        return [*found, *chat_encoding.measure(model_path, quick=quick)]
