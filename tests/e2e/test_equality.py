"""The same tokens however a prompt's KV came to be: computed here, handed off, restored, or begun elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from stack.scrape import samples
from tests.e2e.streams import Stream, ledger_is_clean, prompt, stream
from tests.factories import tiny_llama
from tests.stack import RunningStack

NUM_PROMPTS = 20
NUM_TOKENS = 48
WORKERS = ("prefill-0", "decode-0", "decode-1")
Ids = tuple[int, ...]
ENV = {"SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "16", "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000"}


@pytest.fixture(scope="module", params=["tiny", pytest.param("real", marks=pytest.mark.full)])
def model(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 model: a random one of the same architecture and tokenizer, or the real one."""
    if request.param == "real":
        return smollm2
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return tiny_llama(folder, seed=3, tokenizer_from=smollm2, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def mixed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Ids]:
    """The token ids of one mixed worker that computes everything itself."""
    folder = tmp_path_factory.mktemp("mixed")
    with RunningStack(folder, model=str(model), runner="torch", mixed=1, kvstore=0, router=0) as running:
        ids = asyncio.run(all_ids(running))
    assert len(set(ids)) > NUM_PROMPTS // 2
    return ids


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("apart")
    with RunningStack(folder, model=str(model), runner="torch", prefill=1, decode=2, kvstore=1, router=1,
                      max_num_seqs=4, env=ENV) as running:  # some streams wait while others draw
        yield running


async def all_ids(stack: RunningStack) -> list[Ids]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=170) as client:
        done = await asyncio.gather(*streams(client, stack.model))
    assert [s.error for s in done] == [None] * NUM_PROMPTS
    return [s.token_ids for s in done]


def streams(  # type: ignore[no-untyped-def]
    openai: AsyncOpenAI, model: str, salt: str = "", on_chunk: Callable[[], None] = lambda: None
):
    """Half of them greedy, half of them seeded."""
    return [stream(openai, model, prompt(i, 60 + 9 * i), num_tokens=NUM_TOKENS, salt=salt, on_chunk=on_chunk,
                   **({"temperature": 0} if i % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + i}))
            for i in range(NUM_PROMPTS)]


@pytest.fixture
async def openai(stack: RunningStack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=170) as client:
        yield client


def moved(stack: RunningStack, transport: str) -> float:
    return sum(s.value for w in ("decode-0", "decode-1") for s in samples(stack.service(w).metrics_address or "")
               if s.name == "shoal_kv_transfer_bytes_total" and s.labels["transport"] == transport)


async def first_hand_off(stack: RunningStack, transport: str) -> None:
    """Until the router knows all workers and the gateway the router: answers do not wait for that, hand-offs do."""
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        deadline, count = time.monotonic() + 60, itertools.count(1000)
        while not moved(stack, transport):
            assert time.monotonic() < deadline, "nothing was handed off"
            await client.completions.create(model=stack.model, prompt=prompt(next(count), 100), max_tokens=1)


def total(stack: RunningStack, name: str, workers: tuple[str, ...] = WORKERS) -> float:
    return sum(stack.metrics(w).get(name, 0) for w in workers)


async def at_rest(stack: RunningStack) -> float:
    """Blocks that the workers wrote to the store, once that has come to rest."""
    before = -1.0
    deadline = time.monotonic() + 30
    while (now := total(stack, "shoal_kv_store_written_blocks_total")) != before:
        assert time.monotonic() < deadline, "the write-back does not come to rest"
        before = now
        await asyncio.sleep(1.0)
    return now


async def restart(stack: RunningStack, *names: str) -> None:
    for name in names:
        stack.kill(name, signal.SIGKILL)
    for name in names:
        await asyncio.to_thread(stack.wait_healed, name)


async def test_handed_off_over_shared_memory(stack: RunningStack, openai: AsyncOpenAI, mixed: list[Ids]) -> None:
    done = await asyncio.gather(*streams(openai, stack.model))
    assert [s.token_ids for s in done] == mixed
    assert moved(stack, "shm") > 0
    assert moved(stack, "grpc") == 0
    assert await ledger_is_clean(stack, WORKERS)


async def test_restored_from_the_store_after_all_workers_were_restarted(
    stack: RunningStack, openai: AsyncOpenAI, mixed: list[Ids]
) -> None:
    assert await at_rest(stack) > 0
    await restart(stack, *WORKERS)
    done = await asyncio.gather(*streams(openai, stack.model))
    assert [s.token_ids for s in done] == mixed
    assert sum(s.num_cached_tokens > 0 for s in done) > NUM_PROMPTS // 2
    assert total(stack, "shoal_kv_store_loaded_blocks_total") > 0
    assert stack.metrics("kvstore-0")["shoal_kvstore_hits_total"] > 0
    assert await ledger_is_clean(stack, WORKERS)


async def test_restored_from_ssd_after_the_store_was_restarted_too(
    stack: RunningStack, openai: AsyncOpenAI, mixed: list[Ids]
) -> None:
    await at_rest(stack)
    await restart(stack, "kvstore-0", *WORKERS)
    done = await asyncio.gather(*streams(openai, stack.model))
    assert [s.token_ids for s in done] == mixed
    from_disk = [s.value for s in samples(stack.service("kvstore-0").metrics_address or "")
                 if s.name == "shoal_kvstore_hits_total" and s.labels["tier"] == "ssd"]
    assert sum(from_disk) > 0
    assert sum(s.num_cached_tokens > 0 for s in done) > 0


async def test_migrated_at_a_random_token(
    stack: RunningStack, openai: AsyncOpenAI, mixed: list[Ids], model: Path
) -> None:
    """The worker dies somewhere between the first and the last token of its streams, several times over."""
    rng = random.Random(11)
    num_moved, turn = 0.0, 0
    while num_moved == 0 or turn < 2:  # a tiny model's stream may be over before its client has read a word
        assert turn < 6, "no stream was under way when its worker died"
        before = stack.metrics("gateway-0").get("shoal_gateway_migrations_total", 0)
        chunks = itertools.count(1)
        last = rng.randint(1, 60)  # of all twenty streams together: some are at their first token, none at its end

        def on_chunk(chunks: Iterator[int] = chunks, last: int = last) -> None:
            if next(chunks) == last:
                stack.kill("decode-0", signal.SIGKILL)

        shaken: list[Stream] = await asyncio.gather(*streams(openai, stack.model, f"m{turn}", on_chunk))
        assert [s.error for s in shaken] == [None] * NUM_PROMPTS
        assert [s.token_ids for s in shaken] == mixed
        num_moved += stack.metrics("gateway-0").get("shoal_gateway_migrations_total", 0) - before
        turn += 1
        await asyncio.to_thread(stack.wait_healed, "decode-0")


async def test_handed_off_as_messages(
    model: Path, mixed: list[Ids], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("grpc")
    with RunningStack(folder, model=str(model), runner="torch", prefill=1, decode=2, kvstore=0, router=1,
                      transport="grpc", env=ENV) as running:
        await first_hand_off(running, "grpc")
        before = moved(running, "grpc")
        assert await all_ids(running) == mixed
        assert moved(running, "grpc") > before
        assert moved(running, "shm") == 0
