"""A decode service in this process: real gRPC on a free port, a mock runner, in-memory bus and registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from common.block_hash import HashScheme
from common.bus import MemoryBus
from common.clients.decode import DecodeClient
from common.directory import Directory
from common.errors import FingerprintMismatch, InvalidRequest, ShoalError, Unavailable, WorkerLost
from common.generation import FinishReason, Generation, TokenDelta
from common.registry import MemoryRegistry
from common.sampling_params import SamplingParams
from common.service_host import Deps
from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeService, build
from tests.factories import tiny_llama

MODEL = "tiny"
PROMPT = tuple(range(10, 50))


class Running(NamedTuple):
    service: DecodeService
    client: DecodeClient
    deps: Deps
    scheme: HashScheme

    def generation(self, request_id: str, num_tokens: int = 8, prompt: tuple[int, ...] = PROMPT) -> Generation:
        hashes = tuple(self.scheme.chain(self.scheme.root(), prompt))
        return Generation(request_id, MODEL, prompt, hashes, SamplingParams(max_tokens=num_tokens, ignore_eos=True))

    async def run(self, generation: Generation) -> list[TokenDelta]:
        return [delta async for delta in self.client.generate("decode-0", generation)]

    @property
    def stats(self):  # type: ignore[no-untyped-def]
        assert self.service._worker is not None
        return self.service._worker.stats


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    deps = Deps(MemoryBus(), MemoryRegistry())
    config = DecodeConfig(
        model_path=str(tiny_llama(tmp_path / MODEL)), runner="mock-hash", service_id="decode-0", num_blocks=64,
        mock_step_s=0.005, load_interval_s=0.1, max_model_len=512, engine_process=False)
    service = build(config, deps)
    await service.start()
    directory = Directory(deps.registry, poll_s=0.05)
    await directory.start()
    client = DecodeClient(directory, deps.bus)
    await client.start()
    views = await client.wait_for_workers(MODEL, 5)
    print_ = views[0].fingerprint
    scheme = HashScheme(await deps.registry.deployment_key(), MODEL, print_.revision, print_.dtype, print_.block_size)
    yield Running(service, client, deps, scheme)
    await client.stop()
    await directory.stop()
    await service.stop()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


async def test_tokens_arrive_with_counts_and_one_finish(running: Running) -> None:
    deltas = await running.run(running.generation("a"))
    assert [d.finish_reason for d in deltas] == [None] * 7 + [FinishReason.LENGTH]
    assert (deltas[-1].num_prompt_tokens, deltas[-1].num_output_tokens, len(tokens(deltas))) == (40, 8, 8)


async def test_all_choices_of_a_request_come_each_with_one_finish_and_end_its_stream(running: Running) -> None:
    asked = running.generation("a")
    deltas = await running.run(replace(asked, params=replace(asked.params, n=3, prompt_logprobs=1)))
    for choice in range(3):
        own = [d for d in deltas if d.choice == choice]
        assert [d.finish_reason for d in own] == [None] * 7 + [FinishReason.LENGTH]
    assert [d.choice for d in deltas if d.prompt_logprobs] == [0]
    assert deltas[0].prompt_logprobs, "the prompt's come before anything of the others"
    again = await running.run(running.generation("a"))  # the id is free again, here and there
    assert tokens(again) == tokens([d for d in deltas if d.choice == 0])


async def test_closing_early_aborts_all_choices(running: Running) -> None:
    asked = running.generation("a", 400)
    stream = running.client.generate("decode-0", replace(asked, params=replace(asked.params, n=3)))
    async for _ in stream:
        break
    await until(lambda: running.stats.num_running == 3)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: running.stats.num_running == 0 and running.stats.num_free_blocks == 64)
    assert 3 <= running.stats.num_generated_tokens < 3 * 400


async def test_a_repeated_prompt_is_reported_as_cached_with_the_same_tokens(running: Running) -> None:
    first = await running.run(running.generation("a"))
    second = await running.run(running.generation("b"))
    assert tokens(first) == tokens(second)
    assert (first[-1].num_cached_tokens, second[-1].num_cached_tokens) == (0, 32)


async def test_many_requests_share_one_stream_and_get_what_each_gets_alone(running: Running) -> None:
    prompts = {f"r{i}": tuple(range(i, i + 20 + i)) for i in range(12)}
    alone = {k: tokens(await running.run(running.generation(k, 16, p))) for k, p in prompts.items()}
    together = await asyncio.gather(*(running.run(running.generation(k, 16, p)) for k, p in prompts.items()))
    assert [tokens(t) for t in together] == list(alone.values())


async def test_closing_the_iterator_aborts_and_frees_the_blocks(running: Running) -> None:
    stream = running.client.generate("decode-0", running.generation("a", 400))
    async for _ in stream:
        break
    await until(lambda: running.stats.num_free_blocks < 64)
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: running.stats.num_running == 0 and running.stats.num_free_blocks == 64)
    assert 1 <= running.stats.num_generated_tokens < 400


async def test_a_caller_that_vanishes_has_all_its_requests_aborted(running: Running) -> None:
    waiting = [asyncio.create_task(running.run(running.generation(f"r{i}", 400))) for i in range(3)]
    await until(lambda: running.stats.num_running == 3)
    await running.client.stop()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, WorkerLost) for r in results)
    await until(lambda: running.stats.num_running == 0 and running.stats.num_free_blocks == 64)


async def test_a_wrong_hash_a_wrong_model_and_a_live_id_are_refused_and_others_go_on(running: Running) -> None:
    beside = asyncio.create_task(running.run(running.generation("beside", 60)))
    good = running.generation("x")
    salted = Generation("x", MODEL, PROMPT, good.block_hashes, good.params, cache_salt="other")
    elsewhere = Generation("y", "nope", PROMPT, good.block_hashes, good.params)
    for bad, error in ((salted, FingerprintMismatch), (elsewhere, InvalidRequest),
                       (running.generation("beside"), InvalidRequest)):
        with pytest.raises(error):
            await running.run(bad)
    assert len(tokens(await beside)) == 60


async def test_a_draining_worker_finishes_what_runs_and_refuses_the_rest(running: Running) -> None:
    beside = asyncio.create_task(running.run(running.generation("beside", 60)))
    await until(lambda: running.stats.num_running == 1)
    draining = asyncio.create_task(running.service.drain())
    await asyncio.sleep(0.02)
    with pytest.raises(Unavailable):
        await running.run(running.generation("late"))
    assert len(tokens(await beside)) == 60
    await asyncio.wait_for(draining, 5)
    await until(lambda: running.client.workers(MODEL) == [])


async def test_a_stopped_worker_answers_what_is_left(running: Running) -> None:
    left = asyncio.create_task(running.run(running.generation("left", 400)))
    await until(lambda: running.stats.num_running == 1)
    assert running.service._worker is not None
    await running.service._worker.stop()
    with pytest.raises(ShoalError):
        await left


async def test_the_load_reaches_the_callers_view(running: Running) -> None:
    beside = asyncio.create_task(running.run(running.generation("beside", 300)))
    await until(lambda: running.client.workers(MODEL)[0].num_running == 1)
    at_work = running.client.workers(MODEL)[0]
    assert (at_work.num_blocks, at_work.num_in_flight) == (64, 1)
    assert at_work.num_free_blocks < 64
    beside.cancel()
    await until(lambda: running.client.workers(MODEL)[0].num_running == 0)
    at_rest = running.client.workers(MODEL)[0]
    assert (at_rest.num_free_blocks, at_rest.num_in_flight) == (64, 0)


async def test_an_engine_that_fails_answers_its_requests_and_reports(running: Running) -> None:
    assert running.service._worker is not None

    def broken(core: object) -> None:
        core._runner.launch = None  # type: ignore[attr-defined]

    left = asyncio.create_task(running.run(running.generation("left", 400)))
    await until(lambda: running.stats.num_running == 1)
    running.service._worker.engine._engine.call(broken)
    with pytest.raises(ShoalError, match="engine failed"):
        await left
    await until(lambda: running.deps.failure is not None)


async def test_the_prefix_cache_can_be_reset(running: Running) -> None:
    assert running.service._worker is not None
    await running.run(running.generation("a"))
    assert await running.service._worker.reset_prefix_cache() == 2
    assert (await running.run(running.generation("b")))[-1].num_cached_tokens == 0
