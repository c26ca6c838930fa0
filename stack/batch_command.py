"""`shoal batch` on the running stack, or on one of its own when none runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stack.batch import run_batch
from stack.own_stack import running_or_own_stack


def run(
    source: Path, output: Path, errors: Path | None, url: str, api_key: str, state_dir: Path | None,
    concurrency: int, timeout_s: float,
) -> bool:
    """True when every request has been answered well. Prints one line of counts."""
    refused = errors or output.with_suffix(".errors.jsonl")
    with running_or_own_stack(url, state_dir) as (at, _):
        counts = asyncio.run(run_batch(
            source, output, refused, at, api_key, concurrency=concurrency, timeout_s=timeout_s))
    told = f"{counts.num_completed} answered"
    if counts.num_done_before:
        told += f", {counts.num_done_before} were there before"
    if counts.num_failed:
        told += f", {counts.num_failed} failed: see {refused}"
    print(told)
    return not counts.num_failed
