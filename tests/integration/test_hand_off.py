"""Prefill and decode services in this process: real gRPC and shared memory, mock runners that verify every block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from common.block_hash import HashScheme
from common.bus import MemoryBus
from common.clients.decode import DecodeClient
from common.directory import Directory
from common.generation import Generation, TokenDelta
from common.placement import Placement
from common.registry import MemoryRegistry
from common.sampling_params import SamplingParams
from common.service_host import Deps
from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeService
from engine.core import Reservation
from engine.mock_runner import hashed_token
from engine.request import EngineRequest
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillService
from tests.factories import tiny_llama

MODEL = "tiny"
BLOCK = 16
BLOCK_BYTES = BLOCK * 4  # of the mock runner
VIA = Placement("decode-0", prefill_worker_id="prefill-0")


class Pair:
    """One prefill and one decode worker, and a client of the latter."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.deps = Deps(MemoryBus(), MemoryRegistry())
        model = str(tiny_llama(folder / MODEL, max_position_embeddings=8192))
        common = {"model_path": model, "runner": "mock-hash", "num_blocks": 512, "shm_dir": str(folder / "shm"),
                  "max_num_batched_tokens": 256, "mock_step_s": 0.01, "engine_process": False}
        self.decode = DecodeService(DecodeConfig(
            service_id="decode-0", role="decode", transport=transport, handoff_stall_s=1.0, **common), self.deps)
        self.prefill = PrefillService(PrefillConfig(service_id="prefill-0", max_transfers=2, **common), self.deps)
        self.folder = folder

    async def start(self) -> None:
        await self.prefill.start()
        await self.decode.start()
        self.directory = Directory(self.deps.registry, poll_s=0.05)
        await self.directory.start()
        self.client = DecodeClient(self.directory, self.deps.bus)
        await self.client.start()
        print_ = (await self.client.wait_for_workers(MODEL, 5))[0].fingerprint
        self.scheme = HashScheme(
            await self.deps.registry.deployment_key(), MODEL, print_.revision, print_.dtype, print_.block_size)
        deadline = time.monotonic() + 5
        while self.decode._directory.get("prefill", "prefill-0") is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        await self.client.stop()
        await self.directory.stop()
        await self.decode.stop()
        await self.prefill.stop()

    async def run(
        self, name: str, prompt: list[int], num_tokens: int = 8, placement: Placement | None = VIA
    ) -> list[TokenDelta]:
        hashes = tuple(self.scheme.chain(self.scheme.root(), prompt))
        generation = Generation(
            name, MODEL, tuple(prompt), hashes, SamplingParams(max_tokens=num_tokens, ignore_eos=True),
            placement=placement, timeout_s=30)
        return [delta async for delta in self.client.generate("decode-0", generation)]

    @property
    def received(self):  # type: ignore[no-untyped-def]
        counts = self.decode._worker._admission._receiver.counts  # type: ignore[union-attr]
        return next(iter(counts.values()))

    @property
    def sent(self):  # type: ignore[no-untyped-def]
        return self.prefill._parts.sender.counts  # type: ignore[union-attr]

    async def settled(self) -> None:
        """Blocks and requests are back where they were, on both sides, within two seconds; none has leaked."""
        decode, prefill = self.decode._worker.engine, self.prefill._parts.engine  # type: ignore[union-attr]
        await until(lambda: all(
            e.stats.num_free_blocks == 512 and e.stats.num_running == 0 and e.stats.num_awaiting == 0
            for e in (decode, prefill)), 2.0)
        for engine in (decode, prefill):
            await engine.call(lambda core: core.check_integrity())
        assert list((self.folder / "shm").glob("landing-*")) == []


@pytest.fixture(params=["shm", "grpc"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    # Two workers of one process would register the same series.
    monkeypatch.setattr("decode_svc.service.REGISTRY", CollectorRegistry())
    running = Pair(tmp_path, request.param)
    await running.start()
    yield running
    await running.stop()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.01)


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [t for d in deltas for t in d.token_ids]


def oracle(prompt: list[int], num_tokens: int) -> list[int]:
    known = list(prompt)
    for _ in range(num_tokens):
        known.append(hashed_token(known, 256, frozenset({2})))
    return known[len(prompt) :]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [3 + (seed * 31 + i * i + 7 * i) % 250 for i in range(num_tokens)]


async def test_only_what_decode_lacks_is_moved_and_it_lands_while_prefill_computes(pair: Pair) -> None:
    """2,000 tokens, 1,000 of them cached at the decode worker alone, a token budget of 256."""
    prompt = prompt_of(2000)
    await pair.run("warm", prompt[:1001], 1, placement=None)
    await pair.settled()
    deltas = await pair.run("moved", prompt)
    assert tokens(deltas) == oracle(prompt, 8)
    had = 1000 // BLOCK  # full blocks
    lacked = -(-1999 // BLOCK) - had
    assert pair.received.num_blocks == lacked
    assert pair.received.num_bytes == lacked * BLOCK_BYTES
    assert pair.received.num_overlapped == 1
    assert pair.sent.num_tokens_computed == 1999  # prefill had nothing: it computed all that it needed
    assert deltas[-1].num_cached_tokens == had * BLOCK
    await pair.settled()


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 18, 32, 33, 40, 700])
async def test_any_length_of_prompt_gives_the_tokens_of_a_local_one(pair: Pair, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens, seed=num_tokens)
    assert tokens(await pair.run("r", prompt)) == oracle(prompt, 8)
    assert pair.received.num_fallbacks == 0
    await pair.settled()


async def test_a_prompt_cached_at_prefill_is_sent_without_computing_it_again(pair: Pair) -> None:
    prompt = prompt_of(500)
    await pair.run("first", prompt)
    await pair.decode._worker.reset_prefix_cache()  # type: ignore[union-attr]
    deltas = await pair.run("second", prompt)
    assert tokens(deltas) == oracle(prompt, 8)
    assert deltas[-1].num_cached_tokens == 496
    assert pair.sent.num_tokens_cached == 496
    await pair.settled()


async def test_many_hand_offs_at_once_mix_with_local_prompts_and_refused_slots_fall_back(pair: Pair) -> None:
    prompts = {f"r{i}": prompt_of(200 + 37 * i, seed=i) for i in range(8)}
    results = await asyncio.gather(*(
        pair.run(name, prompt, placement=VIA if i % 4 else None) for i, (name, prompt) in enumerate(prompts.items())))
    assert [tokens(r) for r in results] == [oracle(p, 8) for p in prompts.values()]
    await pair.settled()


async def test_a_resumed_request_is_handed_off_with_its_outputs(pair: Pair) -> None:
    prompt = prompt_of(300)
    wanted = oracle(prompt, 12)
    hashes = tuple(pair.scheme.chain(pair.scheme.root(), prompt))
    generation = Generation(
        "again", MODEL, tuple(prompt), hashes, SamplingParams(max_tokens=12, ignore_eos=True), placement=VIA,
        output_token_ids=tuple(wanted[:5]), attempt=1, timeout_s=30)
    deltas = [d async for d in pair.client.generate("decode-0", generation)]
    assert tokens(deltas) == wanted[5:]
    assert deltas[-1].num_prompt_tokens == 300
    await pair.settled()


@pytest.mark.parametrize("after_s", [0.0, 0.03, 0.08])
async def test_hanging_up_during_a_hand_off_frees_the_blocks_on_both_sides(pair: Pair, after_s: float) -> None:
    running = asyncio.create_task(pair.run("left", prompt_of(3000), 400))
    await asyncio.sleep(after_s)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await pair.settled()


@pytest.mark.parametrize("side", ["decode", "prefill"])
async def test_hanging_up_while_blocks_are_being_reserved_frees_them(pair: Pair, side: str) -> None:
    engine = pair.decode._worker.engine if side == "decode" else pair.prefill._parts.engine  # type: ignore[union-attr]
    reserve, reached = engine.core.reserve, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow_reserve(asked: EngineRequest, grammar: object = None) -> Reservation:
        loop.call_soon_threadsafe(reached.set)
        time.sleep(0.3)  # in the engine's thread: the caller is gone before the grant
        return reserve(asked)

    engine.core.reserve = slow_reserve  # type: ignore[method-assign]
    running = asyncio.create_task(pair.run("left", prompt_of(900), 400))
    await reached.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.sleep(0.5)
    await pair.settled()


@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
async def test_a_prefill_worker_that_vanishes_at_any_moment_costs_only_time(pair: Pair, after_s: float) -> None:
    """B24: before the transfer, half-way, or after the last bytes."""
    prompt = prompt_of(3000)
    wanted = oracle(prompt, 8)
    running = asyncio.create_task(pair.run("r", prompt))
    await asyncio.sleep(after_s)
    await pair.prefill._host.server.stop(grace=0)
    assert tokens(await running) == wanted
    assert pair.received.num_fallbacks <= 1
    await pair.settled()


async def test_what_has_landed_before_the_loss_is_not_computed_again(pair: Pair) -> None:
    prompt = prompt_of(3000)
    wanted = oracle(prompt, 8)
    running = asyncio.create_task(pair.run("r", prompt))
    await until(lambda: pair.decode._worker.stats.num_awaiting == 1)  # type: ignore[union-attr]
    await until(lambda: pair.received.num_blocks >= 32)
    await pair.prefill._host.server.stop(grace=0)
    assert tokens(await running) == wanted
    assert pair.received.num_fallbacks == 1
    assert 32 <= pair.received.num_blocks < 188
    await pair.settled()


async def test_a_prefill_worker_that_stalls_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_args: object) -> int:
        await asyncio.sleep(3600)
        return 0

    monkeypatch.setattr(pair.prefill._parts.sender, "_next_progress", never)  # type: ignore[union-attr]
    prompt = prompt_of(900)
    assert tokens(await pair.run("r", prompt)) == oracle(prompt, 8)
    assert pair.received.num_fallbacks == 1
    await pair.settled()


async def test_a_prefill_worker_whose_steps_take_longer_than_the_stall_limit_is_not_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.kv_transfer.sender.PROGRESS_S", 0.1)
    pair.prefill._parts.engine.core._runner._step_seconds = 1.5  # type: ignore[union-attr]
    prompts = [prompt_of(200, seed=1), prompt_of(210, seed=2)]  # the second is reserved while a step runs
    done = await asyncio.gather(*(pair.run(f"r{i}", p) for i, p in enumerate(prompts)))
    assert [tokens(d) for d in done] == [oracle(p, 8) for p in prompts]
    assert pair.received.num_fallbacks == 0
    await pair.settled()


async def test_a_placement_that_names_a_worker_that_is_gone_is_computed_here(pair: Pair) -> None:
    prompt = prompt_of(100)
    gone = Placement("decode-0", prefill_worker_id="prefill-9")
    old_life = Placement("decode-0", prefill_worker_id="prefill-0", prefill_incarnation="other")
    assert tokens(await pair.run("a", prompt, placement=gone)) == oracle(prompt, 8)
    assert tokens(await pair.run("b", prompt_of(100, 1), placement=old_life)) == oracle(prompt_of(100, 1), 8)
    await pair.settled()


async def test_a_late_message_for_an_ended_transfer_reaches_nothing(pair: Pair) -> None:
    import grpc

    from common import rpc
    from proto import prefill_pb2, prefill_pb2_grpc

    async def chunks() -> AsyncIterator[prefill_pb2.KvChunk]:
        yield prefill_pb2.KvChunk(transfer_id="ended", first_block=0, num_blocks=1, payload=b"x" * BLOCK_BYTES)

    channel = rpc.open_channel(pair.decode._host.address)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await prefill_pb2_grpc.KvTransferStub(channel).Push(chunks(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    await channel.close()


