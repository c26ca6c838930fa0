"""Streams whose client, worker or gateway is killed at a random moment: each has one proper end, or a closed socket.

Two gateways: the first lives through everything, so that its memory can be watched; the second is killed as well.
A worker is killed only while all others live, so that there is always one that its streams can move to.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.e2e.streams import ledger_is_clean, prompt
from tests.http_gateway import events, text_of
from tests.stack import RunningStack

NUM_PROMPTS, PROMPT_WORDS, NUM_TOKENS = 6, 60, 50
WORKERS = ("decode-0", "decode-1", "prefill-0")
LIVING = ("gateway-0", "router-0", "tokenizer-0")  # never killed: their memory is watched
KINDS = ("client", "worker", "gateway", "draining gateway")
LATEST_S = 1.2  # of a kill after its round's streams began, which take longer
WARM_UP = 8  # rounds until what grows at first has grown
MIB = 1 << 20
ENV = {
    "SHOAL_DECODE_MOCK_STEP_S": "0.025", "SHOAL_PREFILL_MOCK_STEP_S": "0.02",
    "SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "16", "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000",
}


@dataclass
class Watched:
    """One stream, whatever becomes of it. `number` is that of its prompt."""

    gateway: str
    number: int
    status: int = 0  # 0: no answer was begun
    body: bytes = b""
    is_cut: bool = False  # the connection broke
    is_left: bool = False  # its client closed it
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    async def run(self, client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> None:
        try:
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                self.status = answer.status_code
                async for part in answer.aiter_raw():
                    self.body += part
        except httpx2.TransportError:
            self.is_cut = True

    def leave(self) -> None:
        """The client closes its socket, in whatever state the stream is."""
        assert self.task is not None
        self.is_left = self.task.cancel()

    def chunks(self) -> list[Any]:
        """All events; of a stream that broke off the last may be torn, and is left out."""
        text = self.body.decode("utf-8", "replace" if self.is_cut or self.is_left else "strict")
        return events(text.rpartition("\n\n")[0] if self.is_cut or self.is_left else text)

    def ending(self) -> str:
        """whole, error, refused, left or closed. Raises `AssertionError` for any other end, or more than one."""
        if self.status not in (0, 200):
            assert not self.is_cut or self.is_left
            return "refused"
        chunks = self.chunks()
        bodies = [chunk for chunk in chunks if isinstance(chunk, dict)]
        num_finishes = sum(
            choice["finish_reason"] is not None for body in bodies for choice in body.get("choices", ()))
        num_errors = sum("error" in body for body in bodies)
        num_done = chunks.count("[DONE]")
        if (num_finishes, num_errors, num_done) == (1, 0, 1) and chunks[-1] == "[DONE]":
            return "whole"
        if (num_finishes, num_errors, num_done) == (0, 1, 0) and "error" in chunks[-1]:
            return "error"
        assert (num_errors, num_done) == (0, 0), self
        assert num_finishes <= 1, self
        assert self.is_left or self.is_cut, f"a silent end: {self}"
        return "left" if self.is_left else "closed"


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("stack"), model=str(smollm2), runner="mock-hash", prefill=1, decode=2,
                      router=1, kvstore=0, gateway=2, max_num_batched_tokens=64, env=ENV) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Every request has a connection of its own."""
    async with httpx2.AsyncClient(timeout=60, limits=httpx2.Limits(max_keepalive_connections=0)) as opened:
        yield opened


class Storm:
    """Rounds of streams on both gateways; in each something is killed."""

    def __init__(self, stack: RunningStack, client: httpx2.AsyncClient, seed: int) -> None:
        self.stack, self.client, self.random = stack, client, random.Random(seed)
        self.urls = {name: f"http://{stack.service(name).address}" for name in ("gateway-0", "gateway-1")}
        self.endings: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.texts: dict[int, str] = {}
        self._healing: set[str] = set()

    def start(self, gateway: str, number: int, salt: str) -> Watched:
        watched = Watched(gateway, number)
        watched.task = asyncio.create_task(watched.run(self.client, self.urls[gateway], {
            "model": self.stack.model, "prompt": prompt(number, PROMPT_WORDS), "max_tokens": NUM_TOKENS,
            "temperature": 0, "ignore_eos": True, "stream": True, "cache_salt": salt}))
        return watched

    async def learn(self) -> None:
        """The texts when nothing happens."""
        quiet = [self.start("gateway-0", number, "quiet") for number in range(NUM_PROMPTS)]
        await ended(quiet)
        assert [watched.ending() for watched in quiet] == ["whole"] * NUM_PROMPTS
        self.texts = {watched.number: text_of(watched.chunks()) for watched in quiet}
        assert len(set(self.texts.values())) == NUM_PROMPTS

    async def round(self, number: int, kind: str) -> None:
        await self.healed("gateway-1")
        if kind == "worker":
            await self.healed(*WORKERS)
        streams = [self.start(gateway, i, f"round {number}")
                   for gateway in self.urls for i in self.random.sample(range(NUM_PROMPTS), 3)]
        await asyncio.sleep(self.random.uniform(0.02, LATEST_S))
        await self.kill(kind, streams)
        await ended(streams)
        for watched in streams:
            self.judge(kind, watched)

    async def kill(self, kind: str, streams: list[Watched]) -> None:
        if kind == "client":
            for watched in self.random.sample(streams, self.random.randint(1, 4)):
                watched.leave()
            return
        victim = self.random.choice(WORKERS) if kind == "worker" else "gateway-1"
        await asyncio.to_thread(
            self.stack.kill, victim, signal.SIGTERM if kind == "draining gateway" else signal.SIGKILL)
        self._healing.add(victim)

    def judge(self, kind: str, watched: Watched) -> None:
        """Only who was killed sees it: a client that left, or those of a gateway that was killed outright."""
        ending = watched.ending()
        allowed = {"whole"}
        if watched.is_left:
            allowed |= {"left"}
        if watched.gateway == "gateway-1" and kind == "gateway":
            allowed |= {"closed"}
        if watched.gateway == "gateway-1" and kind == "draining gateway":
            allowed |= {"refused"}  # it came after the signal
        assert ending in allowed, f"{kind}: {ending}: {watched}"
        self.endings[kind][ending] += 1
        if ending == "refused":
            assert watched.status == 503, watched
            return
        text, expected = text_of(watched.chunks()), self.texts[watched.number]
        assert text == expected if ending == "whole" else expected.startswith(text.rstrip("\ufffd")), watched

    async def healed(self, *names: str) -> None:
        for name in self._healing & set(names):
            await asyncio.to_thread(self.stack.wait_healed, name)
            self._healing.discard(name)

    def memory(self) -> dict[str, int]:
        """Resident bytes of the processes that live on."""
        return {name: psutil.Process(self.stack.pid_of(name)).memory_info().rss for name in LIVING}


async def ended(streams: list[Watched]) -> None:
    """Raises `TimeoutError` when one of them hangs."""
    async with asyncio.timeout(60):
        await asyncio.gather(*(watched.task for watched in streams if watched.task), return_exceptions=True)
    failed = [watched.task.exception() for watched in streams if watched.task and not watched.task.cancelled()]
    assert failed == [None] * len(failed)


@pytest.mark.parametrize(("num_kills", "max_growth_bytes"), [
    (12, 4 * MIB), pytest.param(100, 8 * MIB, marks=pytest.mark.full)])  # of each living process
@pytest.mark.timeout(1800)
async def test_every_stream_has_one_end_whoever_is_killed_and_nothing_is_left_of_it(
    stack: RunningStack, client: httpx2.AsyncClient, num_kills: int, max_growth_bytes: int
) -> None:
    storm = Storm(stack, client, seed=num_kills)
    await storm.learn()
    for number in range(WARM_UP):
        await storm.round(number, "client")
    before = {name: (stack.pid_of(name), size) for name, size in storm.memory().items()}
    kinds = [KINDS[i % len(KINDS)] for i in range(num_kills)]
    storm.random.shuffle(kinds)
    for number, kind in enumerate(kinds, WARM_UP):
        await storm.round(number, kind)

    await storm.healed("gateway-1", *WORKERS)
    assert await ledger_is_clean(stack, WORKERS)
    for gateway in storm.urls:
        assert stack.metrics(gateway)["shoal_gateway_requests_in_flight"] == 0
    assert {name: stack.pid_of(name) for name in LIVING} == {name: pid for name, (pid, _) in before.items()}
    growth = {name: size - before[name][1] for name, size in storm.memory().items()}
    assert max(growth.values()) < max_growth_bytes, growth
    # Else nothing was shown: all kinds of ends were seen.
    assert storm.endings["worker"].keys() == {"whole"}
    assert storm.endings["client"]["left"] > 0
    assert storm.endings["gateway"]["closed"] > 0
    assert sum(count.total() for count in storm.endings.values()) == 6 * (num_kills + WARM_UP)
