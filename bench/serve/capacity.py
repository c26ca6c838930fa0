"""How many chunks this client can read per second of one core, beside a general HTTP client on the same streams.

A server in a process of its own streams as fast as it is read. A figure is chunks over the client's CPU time, so the
server's own speed and the other core do not count.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import httpx2
import uvloop
from rich.progress import Progress

from bench.figures import Figure
from bench.serve import workloads
from bench.serve.connection import Endpoint
from bench.serve.load import Load
from bench.serve.options import ServeOptions
from bench.serve.prompts import Prompts
from common.errors import InternalError

_STREAMS: Final = 64
_STOP_S: Final = 5.0


def measure(*, quick: bool) -> list[Figure]:
    """Medians over rounds, the two clients in turn. `quick` takes fewer chunks and rounds."""
    num_chunks, rounds = (100, 3) if quick else (400, 7)
    ours: list[float] = []
    theirs: list[float] = []
    with _raw_server(num_chunks) as url, Progress(transient=True) as bar:
        task = bar.add_task("capacity", total=rounds)
        for _ in range(rounds):
            ours.append(_per_cpu_second(lambda: _with_load(url), num_chunks))
            theirs.append(_per_cpu_second(lambda: uvloop.run(_with_httpx(url)), num_chunks))
            bar.advance(task)
    own, other = statistics.median(ours), statistics.median(theirs)
    return [Figure("client capacity", own, "chunks per core second", "httpx2 and json", other, own / other, 2.0)]


def _per_cpu_second(read: Callable[[], int], num_chunks: int) -> float:
    before = time.process_time()
    chunks = read()
    used = time.process_time() - before
    if chunks != _STREAMS * num_chunks:
        raise InternalError(f"{chunks} of {_STREAMS * num_chunks} chunks came")
    return chunks / used


def _with_load(url: str) -> int:
    requests = workloads.random(_STREAMS, 8, 8, 1000)
    options = ServeOptions(url=url, model="raw-server")
    endpoint = Endpoint(url)
    load = Load(options, endpoint, requests, Prompts(options, endpoint, requests))
    uvloop.run(load.run())
    endpoint.close()
    return sum(len(record.chunk_s) for record in load.records)


async def _with_httpx(url: str) -> int:
    limits = httpx2.Limits(max_connections=_STREAMS)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False) as client:
        return sum(await asyncio.gather(*(_one_httpx(client) for _ in range(_STREAMS))))


async def _one_httpx(client: httpx2.AsyncClient) -> int:
    count = 0
    async with client.stream("POST", "/v1/completions", json={"prompt": [1]}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                count += 1
    return count


@contextmanager
def _raw_server(num_chunks: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.serve.raw_server", str(num_chunks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()
            try:
                server.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
