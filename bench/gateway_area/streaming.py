"""Streams through a whole stack, beside a raw ASGI loop that sends the same bytes, and the CPU time of a token.

At full speed the engine waits for nothing: what is ready while the gateway is busy leaves it together, so an event may
carry several tokens, which is told. The loop sends the same events, and in a second run one like the first of them for
each token. At a pace each token is an event of its own, and its cost is that of the
gateway and the tokenizer together, while all streams are open. On a machine without cores to spare the pace is what it
is: the rate that was reached is told.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.figures import Figure
from bench.gateway_area.bench_stack import NUM_STREAMS, BenchStack, ask
from bench.gateway_area.client import Job, Result
from bench.gateway_area.raw_asgi import events_of
from common.errors import InternalError

MUST_OF_RAW: Final = 0.6
MAX_TOKEN_CPU_US: Final = 60.0
TOKENS_PER_S: Final = 50.0
_STEP_OF_A_STREAM_S: Final = 35e-6  # what a step of the mock takes besides its sleep, about
_TOKENS: Final = "shoal_tokenizer_decoded_tokens_total"  # made into text, by the tokenizer's own count
_PACED_SERVICES: Final = ("gateway", "tokenizer")
_PROMPT: Final = "the harbour lights were counted twice each night because"


@dataclass(frozen=True, slots=True)
class Streams:
    """A run of `num_streams` streams of `num_tokens` tokens each."""

    num_streams: int
    num_tokens: int
    result: Result

    @property
    def all_tokens(self) -> int:
        return self.num_streams * self.num_tokens

    @property
    def tokens_per_s(self) -> float:
        """Requests included."""
        return self.all_tokens / self.result.seconds

    @property
    def tokens_per_event(self) -> float:
        """Of the events with text; each stream also has those of its finish, its usage and its end."""
        return self.all_tokens / max(1, self.result.num_events - 3 * self.num_streams)


def at_full_speed(stack: BenchStack, *, quick: bool) -> list[Figure]:
    """`stack` has an engine that waits for nothing; `quick` takes fewer tokens."""
    num_tokens = 128 if quick else 512
    burst = _streams(stack, NUM_STREAMS, num_tokens, stack.pids("gateway"))
    body = burst.result.first
    return burst_figures(burst, _raw(body, num_tokens), _raw(one_a_token(body, num_tokens), num_tokens))


def at_pace(model_path: Path, *, quick: bool) -> list[Figure]:
    """`quick` takes fewer tokens and fewer streams."""
    num_tokens, num_streams = (128, 64) if quick else (512, NUM_STREAMS)
    step_s = max(0.0, 1 / TOKENS_PER_S - num_streams * _STEP_OF_A_STREAM_S)
    with BenchStack(model_path, step_s=step_s) as stack:
        counter = (stack.state.processes["tokenizer-0"].metrics_address, _TOKENS)
        return paced_figures(_streams(stack, num_streams, num_tokens, stack.pids(*_PACED_SERVICES), counter))


def burst_figures(burst: Streams, raw: Streams, fine: Streams) -> list[Figure]:
    """`raw` sent the events of a stream of `burst`, `fine` one a token; the process "gateway" is watched in each."""
    name = f"{burst.num_streams} streams"
    of_loop, of_fine = (f"raw ASGI loop, {peer.tokens_per_event:.1f} tokens an event" for peer in (raw, fine))
    return [
        Figure(f"{name}: rate", burst.tokens_per_s, "tokens/s", of_loop, raw.tokens_per_s,
               burst.tokens_per_s / raw.tokens_per_s, MUST_OF_RAW),
        Figure(f"{name}: CPU of the HTTP process", _cpu_us(burst), "us a token", of_loop, _cpu_us(raw),
               _cpu_us(raw) / _cpu_us(burst)),
        Figure(f"{name}: rate", burst.tokens_per_s, "tokens/s", of_fine, fine.tokens_per_s,
               burst.tokens_per_s / fine.tokens_per_s),
        Figure(f"{name}: coalescing", burst.tokens_per_event, "tokens an event"),
        Figure(f"{name}: lag of the client, p99", burst.result.lag_p99_ms, "ms", "beside the raw loop",
               raw.result.lag_p99_ms),
        Figure(f"{name}: load average beside it", os.getloadavg()[0], "processes"),
    ]


def paced_figures(paced: Streams) -> list[Figure]:
    """Raises `InternalError` when the streams were never all open."""
    window = paced.result.window
    if window is None or not window.num_events or not window.num_tokens:
        raise InternalError(f"the {paced.num_streams} paced streams were never all open at once")
    tokens = window.num_tokens
    used_us = {service: 1e6 * seconds / tokens for service, seconds in window.cpu_s.items()}
    cost_us = sum(used_us.values())
    name = f"{paced.num_streams} paced streams"
    return [
        Figure(f"{name}: CPU of gateway + tokenizer", cost_us, "us a token", "limit", MAX_TOKEN_CPU_US,
               MAX_TOKEN_CPU_US / cost_us, 1.0),
        *(Figure(f"{name}: CPU of the {service}", us, "us a token") for service, us in used_us.items()),
        Figure(f"{name}: rate of a stream", tokens / window.seconds / paced.num_streams, "tokens/s", "asked",
               TOKENS_PER_S),
        Figure(f"{name}: coalescing", tokens / window.num_events, "tokens an event"),
        Figure(f"{name}: lag of the client, p99", paced.result.lag_p99_ms, "ms"),
        Figure(f"{name}: load average beside it", os.getloadavg()[0], "processes"),
    ]


def _cpu_us(streams: Streams) -> float:
    return 1e6 * streams.result.cpu_s["gateway"] / streams.all_tokens


def _streams(
    stack: BenchStack, num_streams: int, num_tokens: int, pids: dict[str, int],
    counter: tuple[str, str] | None = None,
) -> Streams:
    _asked(stack.state.url, stack.state.model, 8, 8, {})  # opens what is opened once
    return _asked(stack.state.url, stack.state.model, num_streams, num_tokens, pids, counter)


def _asked(
    url: str, model: str, num_streams: int, num_tokens: int, pids: dict[str, int],
    counter: tuple[str, str] | None = None,
) -> Streams:
    bodies: list[dict[str, Any]] = [
        {"model": model, "prompt": f"{number} {_PROMPT}", "max_tokens": num_tokens, "ignore_eos": True,
         "stream": True, "stream_options": {"include_usage": True}} for number in range(num_streams)]
    return Streams(num_streams, num_tokens, ask(Job(
        url, bodies, num_streams, watched=pids, keeps_first=True, token_counter=counter)))


def one_a_token(body: bytes, num_tokens: int) -> bytes:
    """The body of a stream whose events with text are all like its first; finish, usage and end stay."""
    events = events_of(body)
    return b"".join([events[0]] * num_tokens + events[-3:])


def _raw(body: bytes, num_tokens: int) -> Streams:
    with _raw_server(body) as (url, pid):
        return _asked(url, "raw", NUM_STREAMS, num_tokens, {"gateway": pid})


@contextmanager
def _raw_server(body: bytes) -> Iterator[tuple[str, int]]:
    """Its URL and pid. It ends with its input."""
    with subprocess.Popen([sys.executable, "-m", "bench.gateway_area.raw_asgi", str(len(body))],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(body)
            process.stdin.flush()
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()
