"""Requests from JSONL files: `custom` prompts and `timed_trace` records, one object a line.

`custom`: `{"prompt": TEXT or [IDS], "output_tokens": N}`, as `vllm bench serve` reads it (`output_tokens` may be left
out). `timed_trace`: `{"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [..]}`, the format of the
Mooncake traces: each hash id stands for a block of 512 tokens, so that prompts which share ids share a prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from bench.serve.workloads import BenchRequest, draw_tokens
from common.errors import ConfigError

TRACE_BLOCK: Final = 512  # tokens of one hash id
_MAX_LINES: Final = 1_000_000


class _Custom(msgspec.Struct):
    prompt: str | list[int]
    output_tokens: int | None = None


class _Timed(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_custom(path: Path, limit: int | None, output_len: int | None) -> list[BenchRequest]:
    """`output_len` is for lines without `output_tokens`. Raises `ConfigError` naming file and line."""
    requests = []
    for number, line in _lines(path, limit):
        record = _decoded(path, number, line, _Custom)
        wanted = record.output_tokens if record.output_tokens is not None else output_len
        if wanted is None or wanted < 1 or not record.prompt:
            raise _bad(path, number, "needs a prompt, and output_tokens >= 1 unless --output-len is given")
        requests.append(BenchRequest(record.prompt, wanted))
    return requests


def read_timed(path: Path, limit: int | None, vocab: int, seed: int) -> list[BenchRequest]:
    """Arrivals count from the first record. Raises `ConfigError` naming file and line."""
    requests: list[BenchRequest] = []
    began: float | None = None
    for number, line in _lines(path, limit):
        record = _decoded(path, number, line, _Timed)
        if record.input_length < 1 or record.output_length < 1:
            raise _bad(path, number, "input_length and output_length must be at least 1")
        began = record.timestamp if began is None else began
        arrival = (record.timestamp - began) / 1000
        if requests and arrival < requests[-1].arrival:
            raise _bad(path, number, "timestamp goes back; sort the file by it")
        requests.append(BenchRequest(_prompt(record, number, vocab, seed), record.output_length, arrival))
    return requests


def _prompt(record: _Timed, number: int, vocab: int, seed: int) -> list[int]:
    """Each block's tokens come from its hash id alone; what has no hash id is drawn for this line only."""
    ids: list[int] = []
    for hash_id in record.hash_ids:
        ids += _draw([seed, 0, hash_id % 2**64], TRACE_BLOCK, vocab)
    missing = record.input_length - len(ids)
    return (ids + _draw([seed, 1, number], missing, vocab) if missing > 0 else ids)[: record.input_length]


def _draw(seed: list[int], count: int, vocab: int) -> list[int]:
    return draw_tokens(np.random.default_rng(seed), count, vocab)


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    most, found = min(limit or _MAX_LINES, _MAX_LINES), 0
    try:
        with path.open("rb") as source:
            for number, line in enumerate(source, 1):
                if found == most:
                    return
                if line.strip():
                    found += 1
                    yield number, line
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {error.strerror}", param="dataset_path") from None
    if not found:
        raise ConfigError(f"--dataset-path {path}: no requests in it", param="dataset_path")


def _decoded(path: Path, number: int, line: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise _bad(path, number, str(error)) from None


def _bad(path: Path, number: int, why: str) -> ConfigError:
    return ConfigError(f"--dataset-path {path}, line {number}: {why}", param="dataset_path")
