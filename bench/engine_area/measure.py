"""All figures of the engine, part by part."""

from __future__ import annotations

from pathlib import Path

from bench.engine_area import against_transformers, decode_rates, prefix_cache, scheduling, structured
from bench.figures import Figure


def measure(model_path: Path, *, quick: bool, num_threads: int) -> list[Figure]:
    """`quick` takes fewer rounds and shorter prompts."""
    return [
        *scheduling.measure(quick=quick),
        *decode_rates.measure(model_path, quick=quick, num_threads=num_threads),
        *against_transformers.measure(model_path, quick=quick, num_threads=num_threads),
        *prefix_cache.measure(model_path, quick=quick, num_threads=num_threads),
        *structured.measure(model_path, quick=quick, num_threads=num_threads),
    ]
