"""Several choices and several prompts on real processes: a worker dies under them, and none has a wrong token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.e2e.streams import disturbed, ledger_is_clean, prompt
from tests.stack import RunningStack

NUM_CHOICES, NUM_TOKENS = 3, 60
WORKERS = ("mixed-0", "mixed-1")


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("choices"), model=str(smollm2), runner="mock-hash", prefill=0, decode=0,
                      mixed=2, router=1, kvstore=0, env={"SHOAL_DECODE_MOCK_STEP_S": "0.05"}) as running:
        yield running


@pytest.fixture
async def openai(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def choices(openai: AsyncOpenAI, model: str, salt: str) -> dict[int, tuple[str, list[float], str]]:
    """Text, logprobs and finish of each choice of two prompts; nothing comes after a choice's finish."""
    chunks: Any = await openai.completions.create(
        model=model, prompt=[prompt(i, 40) for i in range(2)], n=NUM_CHOICES, max_tokens=NUM_TOKENS, logprobs=1,
        stream=True, extra_body={"ignore_eos": True, "cache_salt": salt})
    texts: dict[int, str] = {}
    logprobs: dict[int, list[float]] = {}
    finishes: dict[int, str] = {}
    async for chunk in chunks:
        for choice in chunk.choices:
            assert choice.index not in finishes
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
    return {i: (texts[i], logprobs[i], finishes[i]) for i in sorted(texts)}


async def test_choices_whose_worker_dies_go_on_elsewhere_without_gap_or_repeat(
    stack: RunningStack, openai: AsyncOpenAI
) -> None:
    quiet = await choices(openai, stack.model, "quiet")
    assert sorted(quiet) == list(range(2 * NUM_CHOICES))
    assert all(len(scores) == NUM_TOKENS and finish == "length" for _, scores, finish in quiet.values())
    asked: list[Any] = [choices(openai, stack.model, "a"), choices(openai, stack.model, "b")]
    shaken: list[Any] = await disturbed(asked, 1.2, lambda: stack.kill("mixed-0", signal.SIGKILL))
    assert shaken == [quiet, quiet]
    assert stack.metrics("gateway-0")["shoal_gateway_migrations_total"] > 0
    await asyncio.to_thread(stack.wait_healed, "mixed-0")
    assert await ledger_is_clean(stack, WORKERS)


async def test_a_stop_that_every_choice_meets_early_frees_the_worker(stack: RunningStack, openai: AsyncOpenAI) -> None:
    whole = await openai.completions.create(model=stack.model, prompt="where it stops", max_tokens=8, extra_body={
        "ignore_eos": True})
    stop = whole.choices[0].text[2:4]
    told = await openai.completions.create(
        model=stack.model, prompt="where it stops", n=NUM_CHOICES, max_tokens=1500, stop=stop, extra_body={
            "ignore_eos": True})
    assert [c.finish_reason for c in told.choices] == ["stop"] * NUM_CHOICES
    assert await ledger_is_clean(stack, WORKERS)
