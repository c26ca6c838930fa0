"""Real processes are killed while eight streams run. Every stream ends once, with its own whole text or one error."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai import APIError, AsyncOpenAI

from tests.stack import RunningStack

NUM_STREAMS = 8
NUM_TOKENS = 120
STEP_S = 0.05  # of the mock engine: a stream takes about six seconds
WITHIN_S = 10.0


class Stream(NamedTuple):
    text: str
    finish_reason: str | None
    error: Exception | None
    seconds: float


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("stack")
    env = {"SHOAL_DECODE_MOCK_STEP_S": str(STEP_S)}
    with RunningStack(folder, model=str(smollm2), runner="mock-hash", mixed=2, env=env) as running:
        yield running


@pytest.fixture
async def openai(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def stream(openai: AsyncOpenAI, model: str, number: int) -> Stream:
    text, reason, error = "", None, None
    started = time.monotonic()
    try:
        chunks: Any = await openai.completions.create(
            model=model, prompt=f"Stream number {number}: the quick brown fox", max_tokens=NUM_TOKENS, temperature=0,
            stream=True, extra_body={"ignore_eos": True})
        async for chunk in chunks:
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
    except APIError as caught:
        error = caught
    return Stream(text, reason, error, time.monotonic() - started)


async def run_streams(openai: AsyncOpenAI, model: str, at_s: float, act: Any) -> list[Stream]:
    running = [asyncio.create_task(stream(openai, model, i)) for i in range(NUM_STREAMS)]
    await asyncio.sleep(at_s)
    assert not any(task.done() for task in running), "the streams were to run while something is killed"
    await asyncio.to_thread(act)
    return list(await asyncio.gather(*running))


async def ledger_is_clean(stack: RunningStack) -> bool:
    """All blocks free again on every worker, none leaked, within two seconds."""
    deadline = time.monotonic() + 2
    while True:
        found = [stack.metrics(name) for name in ("mixed-0", "mixed-1")]
        clean = all(m["shoal_kv_free_blocks"] == m["shoal_kv_blocks"] and m["shoal_kv_leaked_blocks"] == 0
                    and m["shoal_requests_running"] == 0 for m in found)
        if clean or time.monotonic() > deadline:
            return clean
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("victim", ["tokenizer-0", "nats", "valkey"])
async def test_killing_a_dependency_fails_no_stream_and_it_heals(
    stack: RunningStack, openai: AsyncOpenAI, smollm2: Path, victim: str
) -> None:
    quiet = await asyncio.gather(*(stream(openai, smollm2.name, i) for i in range(NUM_STREAMS)))
    shaken = await run_streams(openai, smollm2.name, 1.5, lambda: stack.kill(victim, signal.SIGKILL))
    assert [s.error for s in shaken] == [None] * NUM_STREAMS
    assert [s.finish_reason for s in shaken] == ["length"] * NUM_STREAMS
    assert [s.text for s in shaken] == [s.text for s in quiet]
    await asyncio.to_thread(stack.wait_healed, victim)
    after = await stream(openai, smollm2.name, 0)
    assert (after.error, after.text) == (None, quiet[0].text)
    assert await ledger_is_clean(stack)


async def test_requests_that_start_while_the_tokenizer_is_gone_wait_for_it(
    stack: RunningStack, openai: AsyncOpenAI, smollm2: Path
) -> None:
    quiet = await stream(openai, smollm2.name, 3)
    await asyncio.to_thread(stack.kill, "tokenizer-0", signal.SIGKILL)
    late = await stream(openai, smollm2.name, 3)
    assert (late.error, late.text) == (None, quiet.text)
    await asyncio.to_thread(stack.wait_healed, "tokenizer-0")


async def test_killing_a_worker_ends_its_streams_with_an_error_event_and_leaves_the_others_alone(
    stack: RunningStack, openai: AsyncOpenAI, smollm2: Path
) -> None:
    quiet = await asyncio.gather(*(stream(openai, smollm2.name, i) for i in range(NUM_STREAMS)))
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        stack.kill("mixed-0", signal.SIGKILL)

    started = time.monotonic()
    shaken = await run_streams(openai, smollm2.name, 1.5, kill)
    lost = [s for s in shaken if s.error is not None]
    kept = [(s, q) for s, q in zip(shaken, quiet, strict=True) if s.error is None]
    assert lost, "both workers had streams"
    assert kept
    for s in lost:
        assert s.finish_reason is None
        assert s.seconds - (killed_at[0] - started) < WITHIN_S
    assert all(s.text == q.text and s.finish_reason == "length" for s, q in kept)
    after = await stream(openai, smollm2.name, 0)
    assert (after.error, after.text) == (None, quiet[0].text)
    await asyncio.to_thread(stack.wait_healed, "mixed-0")
    assert await ledger_is_clean(stack)
