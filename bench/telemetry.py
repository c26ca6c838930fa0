"""What seeing costs: CPU time of a whole stack that is traced and scraped against one that is not.

Two stacks with the mock model and the real tokenizer answer the same streams in turn. One sends its traces to an OTLP
receiver in this process, every trace, and has the metrics of all its processes scraped each second; the other has
neither. A figure is the median over the pairs of the CPU time, user and system, of all processes of a stack, NATS and
Valkey included. Spans are sent each second, five times as often as the standard says, so that a turn pays for its
own. Counting for metrics cannot be turned off: both stacks do it, only the scrapes differ.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import psutil
from rich.progress import Progress

from bench.figures import Figure
from common.errors import InternalError
from stack.api_client import ApiClient
from stack.stack_process import StackProcess

MUST: Final = 1 / 1.03
_AT_ONCE: Final = 4
_OUTPUT_TOKENS: Final = 64
_SENDING_S: Final = 1.0
_SCRAPE_S: Final = 1.0
_START_S: Final = 120.0
_FLAGS: Final = {"runner": "mock-hash", "mixed": 1, "kvstore": 1}
_EXPORT: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_SENTENCE: Final = "the harbour lights were counted twice each night because every captain wanted to know "


def measure(model_path: Path, *, quick: bool) -> list[Figure]:
    """`quick` takes fewer and smaller pairs."""
    num_pairs, num_requests = (3, 24) if quick else (10, 80)
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True))
        receiver = opened.enter_context(_Receiver())
        seen = opened.enter_context(_Stack(Path(folder, "seen"), model_path, receiver.env, scraped=True))
        unseen = opened.enter_context(_Stack(Path(folder, "unseen"), model_path, {}, scraped=False))
        bar = opened.enter_context(Progress(transient=True))
        task = bar.add_task("telemetry", total=num_pairs)
        for stack in (seen, unseen):
            stack.answer(num_requests, turn=-1)
        pairs: list[tuple[float, float]] = []
        for turn in range(num_pairs):
            order = (seen, unseen) if turn % 2 else (unseen, seen)  # in turn the first
            used = {stack: stack.answer(num_requests, turn) for stack in order}
            pairs.append((used[seen], used[unseen]))
            bar.advance(task)
        if not receiver.num_bytes or not seen.num_scrapes:
            raise InternalError("nothing was exported or nothing was scraped")
    return figures(pairs, num_requests)


def figures(pairs: list[tuple[float, float]], num_requests: int) -> list[Figure]:
    """From the CPU seconds of each pair, (with telemetry, without)."""
    seen, unseen = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(without / with_it for with_it, without in pairs)
    return [
        Figure("stack with traces and scrapes", seen, "CPU s", "without", unseen, ratio, MUST),
        Figure("telemetry of a request", (seen - unseen) / num_requests * 1e6, "CPU us")]


class _Receiver:
    """Takes in what is exported and drops it unread."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))  # type: ignore[arg-type]
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def env(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}",
                "OTEL_BSP_SCHEDULE_DELAY": str(int(_SENDING_S * 1000))}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return grpc.unary_unary_rpc_method_handler(self._take) if details.method == _EXPORT else None

    def _take(self, request: bytes, _context: Any) -> bytes:
        self.num_bytes += len(request)
        return b""

    def __enter__(self) -> _Receiver:
        self._server.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.stop(grace=None).wait()


class _Stack:
    """A stack of its own; its metrics are scraped while it answers, if at all."""

    def __init__(self, state_dir: Path, model_path: Path, env: dict[str, str], *, scraped: bool) -> None:
        flags = {**_FLAGS, "model": model_path}
        self._process = StackProcess(
            state_dir, [part for name, value in flags.items() for part in (f"--{name}", str(value))], env)
        self._scraped, self.num_scrapes = scraped, 0

    def __enter__(self) -> _Stack:
        try:
            self._state = self._process.wait_ready(_START_S)
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stop()

    def answer(self, num_requests: int, turn: int) -> float:
        """CPU seconds that the stack used for so many streams, until its last span is sent."""
        over = threading.Event()
        scraping = threading.Thread(target=self._scrape, args=(over,))
        before = self._cpu_s()
        if self._scraped:
            scraping.start()
        with ApiClient(self._state.url) as api, ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda number: self._stream(api, f"{turn} {number}"), range(num_requests)))
        time.sleep(1.5 * _SENDING_S)
        over.set()
        if self._scraped:
            scraping.join()
        return self._cpu_s() - before

    def _stream(self, api: ApiClient, name: str) -> None:
        for _ in api.stream("/v1/completions", {
                "model": self._state.model, "prompt": f"{name} {_SENTENCE * 8}", "max_tokens": _OUTPUT_TOKENS,
                "ignore_eos": True}):
            pass

    def _scrape(self, over: threading.Event) -> None:
        while not over.wait(_SCRAPE_S):
            for process in self._state.processes.values():
                address = process.metrics_address
                if address:
                    request = urllib.request.Request(
                        f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
                    with urllib.request.urlopen(request, timeout=5) as answer:
                        answer.read()
                    self.num_scrapes += 1

    def _cpu_s(self) -> float:
        total = 0.0
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total
