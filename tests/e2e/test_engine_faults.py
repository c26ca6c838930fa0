"""Faults that other servers shipped, tried over HTTP on a computed model: sampling, cached prefixes, a pool too small.

Two stacks of one model: a roomy one with a store and a router, and one with a KV pool of seven blocks.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.e2e.api import Api, api_of, refusal
from tests.factories import tiny_llama
from tests.http_gateway import events, text_of
from tests.stack import RunningStack

NUM_BLOCKS = 7  # of 16 tokens
PROMPT = "The lantern by the river was green, and seven foxes"


class Output(NamedTuple):
    token_ids: list[int]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


@pytest.fixture(scope="module")
def model(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny", seed=3, tokenizer_from=smollm2, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def roomy_stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("roomy"), model=model, runner="torch", kvstore=1, router=1,
                      kvstore_dram_bytes=32 << 20, kvstore_ssd_bytes=32 << 20, kv_cache_bytes=32 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def tight_stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("tight"), model=model, runner="torch", kvstore=0, router=0,
                      env={"SHOAL_DECODE_NUM_BLOCKS": str(NUM_BLOCKS)}) as running:
        yield running


@pytest.fixture
async def roomy(roomy_stack: RunningStack) -> AsyncIterator[Api]:
    async with api_of(roomy_stack) as opened:
        yield opened


@pytest.fixture
async def tight(tight_stack: RunningStack) -> AsyncIterator[Api]:
    async with api_of(tight_stack) as opened:
        yield opened


def output(answer: httpx2.Response) -> Output:
    """Of a whole answer or of a stream with usage."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        body = answer.json()
        choice, usage = body["choices"][0], body["usage"]
        ids, text, reason = choice.get("token_ids", []), choice["text"], choice["finish_reason"]
    else:
        *chunks, last, done = events(answer.text)
        assert done == "[DONE]", done
        choices, usage = [chunk["choices"][0] for chunk in chunks], last["usage"]
        ids = [token for choice in choices for token in choice.get("token_ids", ())]
        text, reason = text_of(chunks), choices[-1]["finish_reason"]
    return Output(ids, text, reason, usage["prompt_tokens"], usage["completion_tokens"],
                  usage["prompt_tokens_details"]["cached_tokens"])


async def drawn(api: Api, prompt: Any = PROMPT, num_tokens: int = 16, **sampling: Any) -> Output:
    return output(await api.complete(
        prompt, **{"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True, **sampling}))


async def test_a_seeded_request_draws_the_same_tokens_whoever_runs_beside_it(roomy: Api) -> None:
    """B11"""
    seeded: dict[str, Any] = {"seed": 42, "temperature": 0.8}
    alone = await drawn(roomy, **seeded)
    beside: list[list[dict[str, Any]]] = [
        [], [{"temperature": 0.8}], [seeded], [{"temperature": 0.1 * i, "seed": i} for i in range(7)]]
    for mates in beside * 5:
        first, *others = await asyncio.gather(drawn(roomy, **seeded), *(drawn(roomy, **mate) for mate in mates))
        assert first.token_ids == alone.token_ids
        assert mates != [seeded] or others[0].token_ids == alone.token_ids

    async def later(number: int) -> Output:
        await asyncio.sleep(0.05 * number)
        return await drawn(roomy, num_tokens=64, **seeded)

    staggered = await asyncio.gather(*map(later, range(5)))
    assert {tuple(one.token_ids[:16]) for one in staggered} == {tuple(alone.token_ids)}
    assert len({tuple(one.token_ids) for one in staggered}) == 1


async def test_unseeded_requests_and_other_seeds_differ(roomy: Api) -> None:
    """B11"""
    outputs = await asyncio.gather(
        *(drawn(roomy, temperature=0.8) for _ in range(4)), *(drawn(roomy, temperature=0.8, seed=i) for i in range(4)))
    assert len({tuple(one.token_ids) for one in outputs}) == 8


async def test_a_tiny_temperature_draws_the_greedy_tokens(roomy: Api) -> None:
    """B12"""
    greedy = await drawn(roomy, num_tokens=48)
    assert len(set(greedy.token_ids)) > 4
    tiny = await asyncio.gather(*(
        drawn(roomy, num_tokens=48, temperature=t) for t in (1e-4, 1e-5, 1e-7, 1e-30)))
    assert [one.token_ids for one in tiny] == [greedy.token_ids] * 4
    assert len((await drawn(roomy, num_tokens=48, temperature=1e-3)).token_ids) == 48
    assert (await drawn(roomy, num_tokens=48, temperature=1.5)).token_ids != greedy.token_ids


async def test_a_bias_outside_the_vocabulary_or_the_range_is_refused_and_harms_nobody(roomy: Api) -> None:
    """B12"""
    async with roomy.unharmed():
        for bias in ({"999999": 5}, {"49152": 5}, {"-1": 5}, {"abc": 5}, {"5": 101}, {"5": -101}):
            refusal(await roomy.complete("a", logit_bias=bias), [400], param="logit_bias")
            refusal(await roomy.chat(logit_bias=bias, stream=True), [400], param="logit_bias")
        forced = await drawn(roomy, num_tokens=4, logit_bias={"49151": 100})
        assert forced.token_ids == [49151] * 4


async def test_a_cached_prefix_is_found_only_under_the_salt_that_made_it(roomy: Api) -> None:
    """B20"""
    prompt = [1000 + i for i in range(64)]

    async def cached(salt: str | None) -> int:
        return (await drawn(roomy, prompt, num_tokens=2, cache_salt=salt)).num_cached_tokens

    salts = ("A", "B", None)
    assert [await cached(salt) for salt in salts] == [0, 0, 0]
    assert [await cached(salt) for salt in salts] == [48, 48, 48]
    assert await cached("C") == 0
    assert (await drawn(roomy, [7, *prompt[1:]], num_tokens=2, cache_salt="A")).num_cached_tokens == 0


async def test_a_prefix_in_the_store_is_found_only_under_its_salt(roomy: Api, roomy_stack: RunningStack) -> None:
    """B20"""
    prompt, written = [3000 + i for i in range(200)], "shoal_kv_store_written_blocks_total"
    before = (await asyncio.to_thread(roomy_stack.metrics, roomy.worker)).get(written, 0)
    first = await drawn(roomy, prompt, cache_salt="A")
    await roomy.until(written, lambda count: count >= before + 12)
    await asyncio.to_thread(roomy_stack.kill, roomy.worker, signal.SIGKILL)
    await asyncio.to_thread(roomy_stack.wait_healed, roomy.worker)
    others = [await drawn(roomy, prompt, cache_salt=salt) for salt in ("B", None)]
    assert [other.num_cached_tokens for other in others] == [0, 0]
    restored = await drawn(roomy, prompt, cache_salt="A")
    assert restored.num_cached_tokens == 192
    assert {tuple(one.token_ids) for one in (first, *others, restored)} == {tuple(first.token_ids)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_blocks_nobody(tight: Api, stream: bool) -> None:
    """B21"""
    async with asyncio.timeout(5):
        never, chat = await asyncio.gather(
            tight.complete(list(range(1000, 1200)), stream=stream, max_tokens=1), tight.chat())
    refusal(never, [400, 503])
    assert chat.status_code == 200
    await tight.comes_to_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_that_outgrows_the_pool_is_refused_or_ends_there(tight: Api, stream: bool) -> None:
    """B21"""
    async with asyncio.timeout(10):
        grown, chat = await asyncio.gather(
            tight.complete(list(range(1000, 1100)), stream=stream, max_tokens=100, ignore_eos=True), tight.chat())
    assert chat.status_code == 200
    if grown.status_code == 200:
        body = events(grown.text)[-2] if stream else grown.json()
        assert body["choices"][0]["finish_reason"] == "length"
    else:
        refusal(grown, [400, 503])
    await tight.comes_to_rest()


@pytest.mark.parametrize(("sampling", "stream"), [
    pytest.param({}, False, id="greedy"),
    pytest.param({}, True, id="greedy, streamed"),
    pytest.param({"temperature": 0.8, "seed": 5}, True, id="seeded"),
    pytest.param({"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 6}, False, id="truncated"),
    pytest.param({"logit_bias": {"300": 3.5, "400": 3.5}, "temperature": 0.5, "seed": 7}, True, id="biased"),
    pytest.param({"stop": ["from the first output"]}, False, id="stopped"),
    pytest.param({"stop": ["from the first output"]}, True, id="stopped, streamed"),
])
async def test_preempted_requests_draw_the_tokens_that_they_draw_in_a_large_pool(
    roomy: Api, tight: Api, sampling: dict[str, Any], stream: bool
) -> None:
    """B22"""
    prompts = [[1500 + 50 * i + j for j in range(34)] for i in range(4)]
    if "stop" in sampling:
        text = (await drawn(roomy, prompts[0], num_tokens=35)).text
        sampling = {"stop": [text[len(text) // 2 :][:4]]}
    more = {"num_tokens": 35, **sampling, "stream": stream}
    if stream:
        more["stream_options"] = {"include_usage": True}

    async def all_at_once(api: Api) -> list[Output]:
        return list(await asyncio.gather(*(drawn(api, prompt, **more) for prompt in prompts)))

    before = await tight.metric("shoal_preemptions_total")
    expected, found = await all_at_once(roomy), await all_at_once(tight)
    assert await tight.metric("shoal_preemptions_total") > before
    assert [one._replace(num_cached_tokens=0) for one in found] == [
        one._replace(num_cached_tokens=0) for one in expected]
    assert {one.num_prompt_tokens for one in found} == {34}
    assert all(len(one.token_ids) == one.num_output_tokens for one in found)
    if "stop" in sampling:
        assert (found[0].finish_reason, found[0].num_output_tokens < 35) == ("stop", True)
    else:
        assert {(one.finish_reason, one.num_output_tokens) for one in found} == {("length", 35)}
    await tight.comes_to_rest()
    assert await roomy.metric("shoal_preemptions_total") == 0
