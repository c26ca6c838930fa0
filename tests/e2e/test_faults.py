"""Real processes are killed or stopped while eight streams run: no stream fails, none has a wrong token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from stack.scrape import samples
from tests.e2e.streams import Stream, disturbed, ledger_is_clean, prompt, stream
from tests.stack import RunningStack

NUM_STREAMS = 8
NUM_TOKENS = 70
PROMPT_WORDS = 200
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
ENV = {
    "SHOAL_DECODE_MOCK_STEP_S": "0.05", "SHOAL_PREFILL_MOCK_STEP_S": "0.05", "SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "32",
    "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000",  # hand off whatever it costs: this is about faults
}
EARLY_S, LATE_S = 0.15, 1.5  # while prompts are handed off; while tokens are drawn
VICTIMS = ("tokenizer-0", "nats", "valkey", "prefill-0", "router-0", "kvstore-0")
MATRIX = [(victim, at_s) for victim in VICTIMS for at_s in (EARLY_S, LATE_S)]
SAMPLE = set(random.Random(7).sample(MATRIX, 4)) | {("prefill-0", EARLY_S), ("nats", LATE_S)}


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("stack")
    with RunningStack(folder, model=str(smollm2), runner="mock-hash", prefill=2, decode=2, router=1, kvstore=1,
                      max_num_batched_tokens=64, env=ENV) as running:
        yield running


@pytest.fixture
async def openai(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def quiet(stack: RunningStack) -> list[str]:
    """The texts when nothing happens. The mock's tokens depend on every token before them, and on nothing else."""
    async def run() -> list[Stream]:
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return list(await asyncio.gather(*streams(client, stack.model, "quiet")))

    whole = asyncio.run(run())
    assert [s.error for s in whole] == [None] * NUM_STREAMS
    assert len({s.text for s in whole}) == NUM_STREAMS
    return [s.text for s in whole]


def streams(openai: AsyncOpenAI, model: str, salt: str):  # type: ignore[no-untyped-def]
    return [stream(openai, model, prompt(i, PROMPT_WORDS), num_tokens=NUM_TOKENS, salt=salt)
            for i in range(NUM_STREAMS)]


def stop_all(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def assert_untouched(shaken: list[Stream], quiet: list[str]) -> None:
    assert [s.error for s in shaken] == [None] * NUM_STREAMS
    assert [s.text for s in shaken] == quiet
    assert [s.finish_reason for s in shaken] == ["length"] * NUM_STREAMS


@pytest.mark.parametrize(
    ("victim", "at_s"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.full, id=f"{case[0]}-{case[1]}")
     for case in MATRIX])
async def test_killing_any_service_but_a_decode_worker_is_not_seen_in_a_stream(
    stack: RunningStack, openai: AsyncOpenAI, quiet: list[str], victim: str, at_s: float
) -> None:
    salt = f"{victim}-{at_s}"
    shaken = await disturbed(streams(openai, stack.model, salt), at_s, lambda: stack.kill(victim, signal.SIGKILL))
    assert_untouched(shaken, quiet)
    await asyncio.to_thread(stack.wait_healed, victim)
    after = await stream(openai, stack.model, prompt(0, PROMPT_WORDS), num_tokens=NUM_TOKENS, salt=salt)
    assert (after.error, after.text) == (None, quiet[0])
    assert await ledger_is_clean(stack, WORKERS)


async def test_hand_offs_go_over_shared_memory(stack: RunningStack, quiet: list[str]) -> None:
    found = [s for w in ("decode-0", "decode-1") for s in samples(stack.service(w).metrics_address or "")]
    moved = [s for s in found if s.name == "shoal_kv_transfer_bytes_total"]
    assert sum(s.value for s in moved) > 0
    assert {s.labels["transport"] for s in moved} == {"shm"}


@pytest.mark.parametrize("number", [
    signal.SIGKILL, pytest.param(signal.SIGSTOP, id="SIGSTOP")])
@pytest.mark.parametrize("at_s", [pytest.param(EARLY_S, marks=pytest.mark.full), LATE_S])
async def test_a_decode_worker_that_dies_or_stalls_has_its_streams_go_on_elsewhere(
    stack: RunningStack, openai: AsyncOpenAI, quiet: list[str], number: signal.Signals, at_s: float
) -> None:
    pid = stack.pid_of("decode-0")
    salt = f"{number.name}-{at_s}"
    try:
        shaken = await disturbed(streams(openai, stack.model, salt), at_s, lambda: stack.kill("decode-0", number))
    finally:
        if number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    assert_untouched(shaken, quiet)
    if number is signal.SIGKILL:
        await asyncio.to_thread(stack.wait_healed, "decode-0")
    else:
        await asyncio.sleep(2)  # the stopped worker sees that its callers have gone
    assert await ledger_is_clean(stack, WORKERS)


@pytest.mark.parametrize(("worker", "at_s"), [
    ("decode-0", LATE_S), pytest.param("prefill-0", EARLY_S, marks=pytest.mark.full)])
async def test_an_engine_process_that_dies_is_answered_and_started_again(
    stack: RunningStack, openai: AsyncOpenAI, quiet: list[str], worker: str, at_s: float
) -> None:
    asked = streams(openai, stack.model, f"engine-{worker}")
    assert_untouched(await disturbed(asked, at_s, lambda: stack.kill_engine(worker)), quiet)
    await asyncio.to_thread(stack.wait_healed, worker)
    assert await ledger_is_clean(stack, WORKERS)


async def test_a_nats_that_hangs_and_comes_back_is_not_noticed(
    stack: RunningStack, openai: AsyncOpenAI, quiet: list[str]
) -> None:
    """B28: idle for longer than its clients' patience, then twenty requests at once after it is back."""
    pid = stack.pid_of("nats")
    os.kill(pid, signal.SIGSTOP)
    try:
        during = await stream(openai, stack.model, prompt(0, PROMPT_WORDS), num_tokens=8)
        await asyncio.sleep(6)
    finally:
        os.kill(pid, signal.SIGCONT)
    after = [await stream(openai, stack.model, prompt(i % NUM_STREAMS, 20), num_tokens=2) for i in range(20)]
    assert during.error is None
    assert quiet[0].startswith(during.text)
    assert [s.error for s in after] == [None] * 20
    assert max(s.seconds for s in after) < 10


async def test_only_when_no_decode_worker_is_left_do_streams_end_and_then_with_an_error_in_time(
    stack: RunningStack, openai: AsyncOpenAI, quiet: list[str]
) -> None:
    pids = [stack.pid_of(name) for name in ("decode-0", "decode-1")]
    try:
        shaken = await disturbed(
            streams(openai, stack.model, "none-left"), LATE_S, lambda: stop_all(pids))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert all(s.error is not None and s.finish_reason is None for s in shaken)
    assert all(s.seconds < LATE_S + 20 for s in shaken)
    assert all(q.startswith(s.text) for s, q in zip(shaken, quiet, strict=True))
    for _ in range(50):
        after = await stream(openai, stack.model, prompt(0, PROMPT_WORDS), num_tokens=NUM_TOKENS)
        if after.error is None:
            break
        await asyncio.sleep(0.5)
    assert after.text == quiet[0]
    assert await ledger_is_clean(stack, WORKERS)


async def test_requests_that_start_while_the_tokenizer_is_gone_wait_for_it(
    stack: RunningStack, openai: AsyncOpenAI, quiet: list[str]
) -> None:
    await asyncio.to_thread(stack.kill, "tokenizer-0", signal.SIGKILL)
    late = await stream(openai, stack.model, prompt(3, PROMPT_WORDS), num_tokens=NUM_TOKENS)
    assert (late.error, late.text) == (None, quiet[3])
    await asyncio.to_thread(stack.wait_healed, "tokenizer-0")
