"""Streams over HTTP while something happens to the stack, and what must be true of it afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from openai import APIError, AsyncOpenAI

from tests.stack import RunningStack

WORDS = "the quick brown fox jumps over the lazy dog while seven green lanterns drift along a quiet river "


class Stream(NamedTuple):
    text: str
    finish_reason: str | None
    error: Exception | None
    seconds: float
    num_cached_tokens: int
    token_ids: tuple[int, ...]


def prompt(number: int, num_words: int) -> str:
    words = random.Random(number).choices(WORDS.split(), k=num_words)
    return f"Stream number {number}: " + " ".join(words)


async def stream(
    openai: AsyncOpenAI, model: str, text: str, *, num_tokens: int, salt: str = "",
    on_chunk: Callable[[], None] = lambda: None, **sampling: Any,
) -> Stream:
    """One completion, whatever becomes of it; the salt makes its prompt new to every cache."""
    got, reason, error, cached = "", None, None, 0
    ids: list[int] = []
    started = time.monotonic()
    try:
        chunks: Any = await openai.completions.create(
            model=model, prompt=text, max_tokens=num_tokens, stream=True, stream_options={"include_usage": True},
            **{"temperature": 0, **sampling},
            extra_body={"ignore_eos": True, "cache_salt": salt, "return_token_ids": True})
        async for chunk in chunks:
            cached = chunk.usage.prompt_tokens_details.cached_tokens if chunk.usage else cached
            on_chunk()
            for choice in chunk.choices:
                got += choice.text
                ids += getattr(choice, "token_ids", ())
                reason = choice.finish_reason or reason
    except APIError as caught:
        error = caught
    return Stream(got, reason, error, time.monotonic() - started, cached, tuple(ids))


async def disturbed(
    streams: Sequence[Any], at_s: float, act: Callable[[], None]
) -> list[Stream]:
    """Run the streams together and do something to the stack meanwhile."""
    running = [asyncio.create_task(s) for s in streams]
    await asyncio.sleep(at_s)
    assert not any(task.done() for task in running), "the streams were to run while something happens"
    await asyncio.to_thread(act)
    return list(await asyncio.gather(*running))


async def ledger_is_clean(stack: RunningStack, workers: Sequence[str]) -> bool:
    """All blocks free or cached on every worker within two seconds, none leaked, nothing runs or waits."""
    deadline = time.monotonic() + 2
    while True:
        found = [stack.metrics(name) for name in workers]
        clean = all(m["shoal_kv_free_blocks"] == m["shoal_kv_blocks"] and m["shoal_kv_leaked_blocks"] == 0
                    and m["shoal_requests_running"] == 0 and m["shoal_requests_waiting"] == 0 for m in found)
        if clean or time.monotonic() > deadline:
            return clean
        await asyncio.sleep(0.1)
