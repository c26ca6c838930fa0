from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from bench.gateway_area import requests, streaming
from bench.gateway_area.client import Job, Result, Window, run
from bench.gateway_area.raw_asgi import events_of
from bench.gateway_area.streaming import Streams
from common.errors import InternalError

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def result(
    *, seconds: float = 1.0, num_events: int = 0, cpu_s: float = 1.0, window: Window | None = None,
    latencies_s: list[float] | None = None,
) -> Result:
    return Result(seconds, latencies_s or [], num_events, {"gateway": cpu_s}, 0.0, 0.0, window, b"")


def window(*, num_tokens: float, num_events: int, gateway_s: float, tokenizer_s: float) -> Window:
    return Window(2.0, num_events, num_events, {"gateway": gateway_s, "tokenizer": tokenizer_s}, num_tokens)


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@asynccontextmanager
async def served(answer: Handler) -> AsyncIterator[str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)  # `{}`
                await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_events_are_counted_also_where_their_end_lies_across_two_reads() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (HEAD, chunk(b"data: a\n\ndata: b\n"), chunk(b"\ndata: c\n\n"), b"0\r\n\r\n"):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.001)

    async with served(answer) as url:
        made = await run(Job(url, [{}, {}, {}], 2, keeps_first=True))
    assert not made.failure
    assert (made.num_events, len(made.latencies_s)) == (9, 3)
    assert made.first.startswith(b"data: a\n\ndata: b\n\ndata: c\n\n")


async def test_the_window_lies_between_the_last_begin_and_the_first_end() -> None:
    begun: list[asyncio.StreamWriter] = []

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"data: begun\n\n"))
        begun.append(writer)
        if len(begun) < 3:
            return
        await asyncio.sleep(0.02)
        for stream in begun:
            stream.write(chunk(b"data: 1\n\n"))
        await asyncio.sleep(0.02)
        for stream in begun:
            stream.write(chunk(b"data: 2\n\n") + b"0\r\n\r\n")

    async with served(answer) as url:
        made = await run(Job(url, [{}, {}, {}], 3))
    assert made.num_events == 9
    assert made.window is not None
    assert 3 <= made.window.num_events <= 6  # the first end may be read before or after the others' last events


@pytest.mark.parametrize(("answer", "why"), [
    (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n", "status 503"),
    (b"", "ConnectionError"),
    (b"nonsense\r\n\r\n", "not an HTTP/1.1 answer"),
])
async def test_an_answer_that_is_not_a_whole_200_fails_the_run(answer: bytes, why: str) -> None:
    async def broken(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        if not answer:
            writer.close()

    async with served(broken) as url, asyncio.timeout(10):
        made = await run(Job(url, [{}], 1))
    assert why in made.failure


async def test_at_a_rate_requests_go_out_one_by_one_and_their_latency_counts_from_when_they_were_due() -> None:
    async def slow(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(HEAD + chunk(b"{}") + b"0\r\n\r\n")

    async with served(slow) as url:
        made = await run(Job(url, [{}] * 3, 1, rate=1000.0))
    assert sorted(made.latencies_s)[-1] >= 3 * 0.05 - 0.003  # the last one waited for the two before it


def test_the_raw_loop_sends_the_bytes_it_was_given() -> None:
    body = b'data: {"a":"x"}\n\n: ping\n\ndata: [DONE]\n\n'
    assert b"".join(events_of(body)) == body
    assert len(events_of(body)) == 3


def test_a_stream_with_an_event_a_token_keeps_its_end() -> None:
    assert streaming.one_a_token(b"a\n\nb\n\nfinish\n\nusage\n\ndone\n\n", 3) == (
        b"a\n\n" * 3 + b"finish\n\nusage\n\ndone\n\n")


def test_the_rate_is_judged_by_the_raw_loops_in_the_same_run_and_coalescing_is_told() -> None:
    streams = Streams(2, 100, result(seconds=2.0, num_events=2 * (50 + 3)))
    raw = [Streams(2, 100, result(seconds=s, num_events=2 * (events + 3))) for s, events in ((1.0, 50), (4.0, 100))]
    rate, _cpu, beside_fine, coalescing, *_ = streaming.burst_figures(streams, *raw)
    assert (rate.value, rate.peer_value, rate.ratio, rate.ok) == (100.0, 200.0, 0.5, False)
    assert "2.0 tokens" in rate.peer
    assert (beside_fine.ratio, beside_fine.ok) == (2.0, None)  # it sends other bytes: told, not judged
    assert "1.0 tokens" in beside_fine.peer
    assert coalescing.value == 2.0


@pytest.mark.parametrize(("tokenizer_s", "ok"), [(0.019, True), (0.021, False)])
def test_a_token_costs_what_both_processes_used_while_all_streams_were_open(tokenizer_s: float, ok: bool) -> None:
    seen = window(num_tokens=1000, num_events=500, gateway_s=0.04, tokenizer_s=tokenizer_s)
    cost, *_ = made = streaming.paced_figures(Streams(4, 100, result(window=seen)))
    assert cost.value == pytest.approx(40 + 1000 * tokenizer_s)
    assert cost.ok is ok
    assert {figure.unit: figure.value for figure in made}["tokens/s"] == 1000 / 2.0 / 4


def test_streams_that_were_never_all_open_give_no_figure() -> None:
    with pytest.raises(InternalError, match="never all open"):
        streaming.paced_figures(Streams(4, 100, result()))


def test_the_added_latency_is_the_median_without_the_workers_own_time() -> None:
    full = result(seconds=2.0, latencies_s=[0.1] * 4000)
    made = requests.figures(full, result(latencies_s=[0.005, 0.006, 0.9]), 0.001)
    by_name = {figure.name.partition(": ")[2]: figure for figure in made}
    assert by_name["added latency, p50"].value == pytest.approx(5.0)
    assert by_name["added latency, p50"].ok is False
    assert (by_name["rate"].value, by_name["rate"].ok) == (2000.0, True)
