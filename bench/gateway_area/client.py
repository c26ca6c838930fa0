"""The load client of this area, a process of its own: `python -m bench.gateway_area.client`, a job in, a result out.

It reads no more of an answer than it has to, so that it is not what is measured: it counts events by their empty lines
and HTTP chunks by the parser's callback, keeps times, and tells how late its own loop was. A job's requests go out at
once, `at_once` at a time, or at `rate` a second. Its window lies between the moment when all of its streams have begun
and the end of the first: within it, all are open. The CPU time of the watched processes is read at both ends, and so
is a counter of tokens, for an event may carry several.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import httptools
import msgspec
import psutil
import uvloop

from bench.serve.lag import LoopDelay
from stack.scrape import scrape

_TIMEOUT_S: Final = 120.0
_EVENT_END: Final = b"\n\n"


class Job(msgspec.Struct, frozen=True):
    """`watched`: name → pid. `rate`: requests a second, 0: as fast as `at_once` allows."""

    url: str
    bodies: list[dict[str, Any]]
    at_once: int
    path: str = "/v1/completions"
    rate: float = 0.0
    watched: dict[str, int] = {}
    keeps_first: bool = False  # the first answer's body comes back
    token_counter: tuple[str, str] | None = None  # (metrics address of a process, sample name)


class Window(msgspec.Struct):
    """While all streams were open: seconds, events, HTTP chunks that carried them, tokens, CPU seconds of a process."""

    seconds: float
    num_events: int
    num_chunks: int
    cpu_s: dict[str, float]
    num_tokens: float = 0.0  # 0 without a counter


class Result(msgspec.Struct):
    """`latencies_s` are from when a request was due to the last byte of its answer."""

    seconds: float
    latencies_s: list[float]
    num_events: int
    cpu_s: dict[str, float]
    own_cpu_s: float
    lag_p99_ms: float
    window: Window | None
    first: bytes
    failure: str = ""  # of the first request that did not get a whole 200


@dataclass(slots=True)
class _Count:
    """What all connections have seen."""

    num_events: int = 0
    num_chunks: int = 0
    num_begun: int = 0
    num_ended: int = 0


class Connection(asyncio.Protocol):
    """One request at a time. States: idle → asked → begun (its first event is here) → idle."""

    def __init__(self, seen: _Count, watch: _Watch, *, keeps_body: bool = False) -> None:
        self._seen, self._watch, self._keeps_body = seen, watch, keeps_body
        self.kept = b""
        self._before = b""  # the last byte: an event's end may lie across two reads
        self._begun = False
        self._waiter: asyncio.Future[int] | None = None

    def ask(self, request: bytes) -> asyncio.Future[int]:
        """The status of the answer, once all of it is here. Raises `ConnectionError`."""
        self._parser = httptools.HttpResponseParser(self)
        self._before, self._begun = b"", False
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiter

    def close(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not an HTTP/1.1 answer: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the server closed the connection before the answer's end")

    def on_chunk_header(self) -> None:
        self._seen.num_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._seen.num_events += (self._before + body).count(_EVENT_END)
        self._before = body[-1:]
        if self._keeps_body:
            self.kept += body
        if not self._begun:
            self._begun = True
            self._seen.num_begun += 1
            self._watch.begun()

    def on_message_complete(self) -> None:
        self._seen.num_ended += 1
        self._watch.ended()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(self._parser.get_status_code())

    def _fail(self, why: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionError(why))


class _Watch:
    """The window of a run of all the streams of a job."""

    def __init__(self, seen: _Count, job: Job) -> None:
        self._seen, self._num_streams, self._counter = seen, len(job.bodies), job.token_counter
        self._processes = {name: psutil.Process(pid) for name, pid in job.watched.items()}
        self._counts: list[asyncio.Future[float]] = []  # of tokens: at the window's begin and at its end
        self._opened: tuple[float, int, int, dict[str, float]] | None = None
        self.window: Window | None = None

    def cpu_s(self) -> dict[str, float]:
        return {name: (times := process.cpu_times()).user + times.system for name, process in self._processes.items()}

    def begun(self) -> None:
        if self._seen.num_begun == self._num_streams and not self._seen.num_ended:
            self._opened = time.perf_counter(), self._seen.num_events, self._seen.num_chunks, self.cpu_s()
            self._count()

    def ended(self) -> None:
        if self._opened is None or self.window is not None:
            return
        (started, events, chunks, before), now = self._opened, self.cpu_s()
        self.window = Window(time.perf_counter() - started, self._seen.num_events - events,
                             self._seen.num_chunks - chunks, {name: now[name] - before[name] for name in now})
        self._count()

    async def whole(self) -> Window | None:
        """The window with its tokens; None when the streams were never all open."""
        if self.window is not None and self._counts:
            at_begin, at_end = await asyncio.gather(*self._counts)
            self.window.num_tokens = at_end - at_begin
        return self.window

    def _count(self) -> None:
        """Asked by a thread: it takes a few ms."""
        if self._counter is not None:
            address, name = self._counter
            self._counts.append(asyncio.get_running_loop().run_in_executor(
                None, lambda: scrape(address).get(name, 0.0)))


@dataclass(slots=True)
class _Run:
    job: Job
    requests: list[bytes]
    connections: list[Connection]
    latencies_s: list[float] = field(default_factory=list)
    failure: str = ""

    async def in_turn(self) -> None:
        left = iter(self.requests)

        async def worker(connection: Connection) -> None:
            for request in left:
                await self._one(connection, request, time.perf_counter())

        await asyncio.gather(*map(worker, self.connections))

    async def at_rate(self) -> None:
        """A request that finds no idle connection waits for one: its latency counts from when it was due."""
        idle: asyncio.LifoQueue[Connection] = asyncio.LifoQueue()
        for connection in self.connections:
            idle.put_nowait(connection)
        started = time.perf_counter()

        async def one(number: int, request: bytes) -> None:
            due = started + number / self.job.rate
            await asyncio.sleep(due - time.perf_counter())
            connection = await idle.get()
            await self._one(connection, request, due)
            idle.put_nowait(connection)

        await asyncio.gather(*(one(number, request) for number, request in enumerate(self.requests)))

    async def _one(self, connection: Connection, request: bytes, due: float) -> None:
        status = await connection.ask(request)
        self.latencies_s.append(time.perf_counter() - due)
        if status != 200:
            self.failure = self.failure or f"status {status}"


def encoded(job: Job) -> list[bytes]:
    """Each request as the bytes of a POST."""
    host = urlsplit(job.url).netloc
    bodies = (msgspec.json.encode(body) for body in job.bodies)
    return [f"POST {job.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


async def run(job: Job) -> Result:
    """All answers, or what failed first."""
    loop, seen = asyncio.get_running_loop(), _Count()
    where = urlsplit(job.url)
    host, port = where.hostname or "", where.port or 80
    watch, delay = _Watch(seen, job), LoopDelay()
    connections = [
        (await loop.create_connection(
            lambda keeps=job.keeps_first and not index: Connection(  # type: ignore[misc]
                seen, watch, keeps_body=keeps), host, port))[1]
        for index in range(min(job.at_once, len(job.bodies)))]
    work = _Run(job, encoded(job), connections)
    watcher = asyncio.create_task(delay.watch())
    gc.collect()
    gc.freeze()
    before, own_before, started = watch.cpu_s(), time.process_time(), time.perf_counter()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            await (work.at_rate() if job.rate else work.in_turn())
    except (ConnectionError, TimeoutError) as error:
        work.failure = work.failure or f"{type(error).__name__}: {error}"
    finally:
        watcher.cancel()
    seconds, after = time.perf_counter() - started, watch.cpu_s()
    own_cpu_s = time.process_time() - own_before
    for connection in connections:
        connection.close()
    return Result(seconds, work.latencies_s, seen.num_events, {name: after[name] - before[name] for name in after},
                  own_cpu_s, _p99(delay.delays_s) * 1000, await watch.whole(), connections[0].kept, work.failure)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0


if __name__ == "__main__":
    made = uvloop.run(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Job)))
    sys.stdout.buffer.write(msgspec.json.encode(made))
