"""A service that is told to end while streams run: nothing of theirs is cut, new work goes elsewhere or is refused."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from common.registry import RedisRegistry
from tests.e2e.api import Api, api_of, refusal
from tests.e2e.streams import ledger_is_clean, prompt
from tests.http_gateway import events, text_of
from tests.stack import RunningStack

NUM_TOKENS, NUM_SLOTS = 200, 2  # of a stream; of each of the two decode workers
DRAIN_S = 10
WORKERS = ("decode-0", "decode-1", "prefill-0")
ENV = {
    "SHOAL_DECODE_MOCK_STEP_S": "0.01", "SHOAL_PREFILL_MOCK_STEP_S": "0.01",
    "SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "16", "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000",
}


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("stack"), model=str(smollm2), runner="mock-hash", prefill=1, decode=2,
                      router=1, kvstore=0, max_num_seqs=NUM_SLOTS, drain_timeout_s=DRAIN_S, env=ENV) as running:
        yield running


@pytest.fixture
async def api(stack: RunningStack) -> AsyncIterator[Api]:
    async with api_of(stack) as opened:
        yield opened


def start(api: Api, number: int, **changes: Any) -> asyncio.Task[httpx2.Response]:
    return asyncio.create_task(api.complete(prompt(number, 60), **{
        "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "cache_salt": "drain", **changes}))


async def quiet_texts(api: Api) -> list[str]:
    answers = await asyncio.gather(*(start(api, i, cache_salt="quiet") for i in range(2 * NUM_SLOTS)))
    assert all(events(answer.text)[-1] == "[DONE]" for answer in answers)
    return [text_of(events(answer.text)) for answer in answers]


async def at_the_workers(api: Api, num_requests: int) -> None:
    """So many are at the decode workers."""
    async with asyncio.timeout(10):
        while sum([await api.metric("shoal_requests_running", w) + await api.metric("shoal_requests_waiting", w)
                   for w in ("decode-0", "decode-1")]) < num_requests:
            await asyncio.sleep(0.02)


async def incarnations(stack: RunningStack, name: str) -> list[str]:
    registry = await RedisRegistry.connect(stack.state.redis_url, 5)
    try:
        return [record.incarnation for record in await registry.list() if record.service_id == name]
    finally:
        await registry.close()


async def ended_well(stack: RunningStack, name: str, before: list[str]) -> None:
    """It exited with code 0 and is back under a new name; nothing of the old life is registered."""
    await asyncio.to_thread(stack.wait_healed, name)
    said = [line for line in stack.process.printed().splitlines() if f"{name} exited" in line]
    assert "exited with code 0" in said[-1]
    after = await incarnations(stack, name)
    assert len(after) == 1
    assert after != before
    assert await ledger_is_clean(stack, WORKERS)


async def test_a_gateway_that_is_told_to_end_lets_its_streams_end_first(stack: RunningStack, api: Api) -> None:
    """B30"""
    quiet, before = await quiet_texts(api), await incarnations(stack, "gateway-0")
    streams = [start(api, i) for i in range(2 * NUM_SLOTS)]
    await at_the_workers(api, 2 * NUM_SLOTS)
    queued = start(api, 9, max_tokens=4, stream=False)
    await api.until("shoal_gateway_requests_in_flight", lambda value: value == 2 * NUM_SLOTS + 1, process="gateway-0")
    await asyncio.to_thread(stack.kill, "gateway-0", signal.SIGTERM)
    async with asyncio.timeout(2):
        while (await api.client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
    refusal(await api.chat(), [503], "service_unavailable")
    assert not any(stream.done() for stream in streams), "they were to run while new work is refused"
    for stream, text in zip(streams, quiet, strict=True):
        *chunks, done = events((await stream).text)
        assert (done, chunks[-1]["choices"][0]["finish_reason"]) == ("[DONE]", "length")
        assert text_of(chunks) == text
    assert (await queued).status_code == 200
    await ended_well(stack, "gateway-0", before)
    assert await api.is_alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_past_the_limit_of_a_drain_what_still_runs_ends_in_an_error(
    stack: RunningStack, api: Api, stream: bool
) -> None:
    """B30"""
    before = await incarnations(stack, "gateway-0")
    endless = start(api, 1, max_tokens=100 * DRAIN_S * 4, stream=stream)
    await at_the_workers(api, 1)
    await asyncio.to_thread(stack.kill, "gateway-0", signal.SIGTERM)
    answer = await endless
    if stream:
        *chunks, last = events(answer.text)
        assert last["error"]["code"] == "service_unavailable"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert text_of(chunks) != ""
    else:
        refusal(answer, [503], "service_unavailable")
    await ended_well(stack, "gateway-0", before)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0", "router-0", "tokenizer-0"])
async def test_any_other_service_that_is_told_to_end_is_not_seen_in_a_stream(
    stack: RunningStack, api: Api, victim: str
) -> None:
    """B30"""
    quiet, before = await quiet_texts(api), await incarnations(stack, victim)
    streams = [start(api, i, cache_salt=victim) for i in range(2 * NUM_SLOTS)]
    if victim != "prefill-0":  # which is to have prompts in work
        await at_the_workers(api, 2 * NUM_SLOTS)
    queued = start(api, 9, max_tokens=4, stream=False)
    await asyncio.to_thread(stack.kill, victim, signal.SIGTERM)
    new = start(api, 10, max_tokens=4, stream=False)
    for stream, text in zip(streams, quiet, strict=True):
        *chunks, done = events((await stream).text)
        assert (done, chunks[-1]["choices"][0]["finish_reason"]) == ("[DONE]", "length")
        assert text_of(chunks) == text
    for answer in await asyncio.gather(queued, new):
        assert answer.status_code == 200, answer.text
    await ended_well(stack, victim, before)
    assert await api.is_alive()
