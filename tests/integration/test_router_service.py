"""Real router processes on real NATS and Valkey, in front of workers that have a cache and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import pytest

from common import rpc
from common.bus import NatsBus
from common.clients.kv_events import KV_STREAM, KvEventPublisher
from common.clients.router import RouterClient
from common.clients.worker import LOAD_SUBJECT, WorkerServicer
from common.directory import Directory
from common.errors import NotFound, Unavailable
from common.kv_event import BlocksCleared, BlockStored
from common.placement import Placement, RequestOutcome
from common.registry import Lease, RedisRegistry
from proto import events_pb2, router_pb2, router_pb2_grpc, worker_pb2_grpc
from tests.servers import RealServer
from tests.unit.router_svc.builders import MODEL, block, chain, query, record

ROOT = block(10_000)
PREFIX = chain(0, 100)
LONG = query(block_hashes=PREFIX, num_prompt_tokens=1610)


class Worker:
    """Registers, says what it caches, answers snapshots; its load is what the test sets."""

    def __init__(self, host: Host, worker_id: str, service: str, incarnation: str, role: str) -> None:
        self._host, self.worker_id, self.incarnation = host, worker_id, incarnation
        self._service, self._role = service, role
        self.load = events_pb2.WorkerLoad(
            worker_id=worker_id, incarnation=incarnation, model=MODEL, num_blocks=1000, num_free_blocks=1000,
            step_s=0.01, prefill_tokens_per_s=1000.0)
        self.publisher = KvEventPublisher(host.bus, worker_id, incarnation, MODEL, heartbeat_s=0.3)
        self.num_load_calls = 0
        self.answers_snapshots = True
        self.reports_load = True
        self._server = rpc.new_server()
        self._lease: Lease | None = None
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> Worker:
        worker_pb2_grpc.add_WorkerServicer_to_server(_Answers(self), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.publisher.start()
        self._lease = await self._host.registry.register(record(
            self.worker_id, self._service, self.incarnation, address=f"127.0.0.1:{port}", role=self._role,
            started_at_unix_s=time.time()), 30)
        self._reporting = asyncio.create_task(self._report())
        return self

    async def stop(self, release: bool = True) -> None:
        assert self._reporting is not None
        assert self._lease is not None
        self._reporting.cancel()
        self.publisher.stop()
        await self._server.stop(0)
        if release:
            await self._lease.update(state="draining")
            await asyncio.sleep(0.7)  # directories look twice a second
            await self._lease.release()
        else:
            self._lease._task.cancel()  # type: ignore[attr-defined]

    async def _report(self) -> None:
        while True:
            if self.reports_load:
                await self._host.bus.publish(f"{LOAD_SUBJECT}.{self.worker_id}", self.load.SerializeToString())
            await asyncio.sleep(0.1)


class _Answers(WorkerServicer):
    def __init__(self, worker: Worker) -> None:
        async def reset() -> int:
            return 0

        super().__init__(self._count_load, reset, worker.publisher)
        self._worker = worker

    def _count_load(self) -> events_pb2.WorkerLoad:
        self._worker.num_load_calls += 1
        return self._worker.load

    async def Snapshot(self, request: object, context: object) -> AsyncIterator[object]:  # type: ignore[override]  # noqa: N802
        if not self._worker.answers_snapshots:
            raise Unavailable("no snapshot today")
        async for chunk in super().Snapshot(request, context):  # type: ignore[arg-type]
            yield chunk


class Host:
    """What a gateway has: a bus, a registry, a directory, a router client; and the workers of the test."""

    def __init__(self, nats: RealServer, valkey: RealServer, bus: NatsBus, registry: RedisRegistry) -> None:
        self.nats, self.valkey, self.bus, self.registry = nats, valkey, bus, registry
        self.directory = Directory(registry, poll_s=0.1, grace_s=1.0)
        self.client = RouterClient(self.directory, bus)
        self.workers: list[Worker] = []

    async def worker(
        self, worker_id: str, service: str = "decode", incarnation: str = "a", role: str = "mixed"
    ) -> Worker:
        self.workers.append(worker := await Worker(self, worker_id, service, incarnation, role).start())
        return worker

    @contextmanager
    def router(self, name: str = "router-0", *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "router_svc", "--service-id", name, "--nats-url", self.nats.url, "--redis-url",
                self.valkey.url, "--load-poll-s", "0.2", "--load-stale-s", "1", "--log-level", "warning", *flags]
        process = subprocess.Popen(argv)
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)

    async def routers_up(self, *names: str) -> None:
        await until(lambda: set(names) <= {r.service_id for r in self.directory.records("router")})

    async def hits(self, worker_id: str, cached_tokens: int) -> Placement:
        """Route the long prompt until it goes to that worker for that much cache."""
        seen: list[Placement] = []
        try:
            async with asyncio.timeout(15):
                while True:
                    seen.append(await self.client.route(replace(LONG, request_id=f"h{time.monotonic_ns()}")))
                    if (seen[-1].decode_worker_id, seen[-1].predicted_cached_tokens) == (worker_id, cached_tokens):
                        return seen[-1]
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not placed so: {seen[-1]}") from None

    async def explain(self, request_id: str) -> router_pb2.ExplainResponse:
        (at,) = self.directory.records("router")
        channel = rpc.open_channel(at.address)
        try:
            request = router_pb2.ExplainRequest(request_id=request_id)
            answer: router_pb2.ExplainResponse = await router_pb2_grpc.RouterStub(channel).Explain(request, timeout=5)
            return answer
        finally:
            await channel.close()


@asynccontextmanager
async def host_on(nats: RealServer, valkey: RealServer) -> AsyncIterator[Host]:
    registry = await RedisRegistry.connect(valkey.url, 10)
    host = Host(nats, valkey, await NatsBus.connect(nats.url, "test", 10), registry)
    await host.directory.start()
    try:
        yield host
    finally:
        for worker in host.workers:
            await worker.stop()
        await host.client.stop()
        await host.directory.stop()
        await host.bus.close()
        await registry.close()


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


# A guess lives so short here that what routes see is what workers said.
NO_GUESS = ("--overlay-ttl-s", "0.001")


async def test_a_prefix_is_found_where_it_was_stored_and_not_where_it_was_lost(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        one, two = await host.worker("d0"), await host.worker("d1")
        with host.router("router-0", *NO_GUESS):
            await host.routers_up("router-0")
            one.publisher.publish([BlockStored(PREFIX, ROOT)])
            two.publisher.publish([BlockStored(PREFIX[:40], ROOT)])
            await host.hits("d0", 1600)
            one.publisher.publish([BlocksCleared()])
            await host.hits("d1", 640)
            one.publisher.publish([BlockStored(PREFIX, ROOT)])
            await host.hits("d0", 1600)
            old = one.publisher  # killed, and back cold under the same id
            await one.stop(release=False)
            host.workers.remove(one)
            await host.worker("d0", incarnation="b")
            await host.hits("d1", 640)
            old.publish([BlockStored(PREFIX, ROOT)])
            await host.bus.append(KV_STREAM, "shoal.kv.d0", old._waiting[-1].SerializeToString())
            await asyncio.sleep(0.5)
            assert (await host.hits("d1", 640)).decode_incarnation == "a"


async def test_a_killed_and_a_stopped_router_cost_no_placement_and_a_terminated_one_leaves_in_order(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        await host.worker("d0")
        with host.router("router-0") as one, host.router("router-1") as two, host.router("router-2") as three:
            await host.routers_up("router-0", "router-1", "router-2")
            for number in range(60):
                if number == 20:
                    one.kill()
                if number == 40:
                    os.kill(two.pid, signal.SIGSTOP)
                assert (await host.client.route(replace(LONG, request_id=f"r{number}"))).decode_worker_id == "d0"
            three.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(three.wait, 10) == 0
            await until(lambda: host.directory.get("router", "router-2") is None)
            os.kill(two.pid, signal.SIGCONT)
            assert (await host.client.route(LONG)).decode_worker_id == "d0"


async def test_a_router_that_starts_knows_from_redis_what_no_worker_and_no_stream_can_tell_it(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        worker = await host.worker("d0")
        with host.router("router-0", *NO_GUESS):
            await host.routers_up("router-0")
            worker.publisher.publish([BlockStored(PREFIX, ROOT)])
            await host.hits("d0", 1600)
            client = host.registry._client
            await _until_async(lambda: client.scard("shoal:kv:blocks:d0"), len(PREFIX))
        worker.answers_snapshots = False
        await host.bus._client.jsm().delete_stream(KV_STREAM.name)
        with host.router("router-1", *NO_GUESS):
            await host.routers_up("router-1")
            await host.hits("d0", 1600)


async def test_a_worker_that_died_without_a_word_is_passed_over_before_its_lease_ends(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        dead = await host.worker("d0")
        await host.worker("d1")
        with host.router("router-0", *NO_GUESS):
            await host.routers_up("router-0")
            dead.publisher.publish([BlockStored(PREFIX, ROOT)])
            await host.hits("d0", 1600)
            await dead.stop(release=False)
            host.workers.remove(dead)
            await host.hits("d1", 0)
            assert host.directory.get("decode", "d0") is not None


async def test_routers_that_mirror_the_same_worker_agree_with_it_in_redis(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        worker = await host.worker("d0")
        with host.router("router-0"), host.router("router-1"):
            await host.routers_up("router-0", "router-1")
            for number in range(200):
                worker.publisher.publish([BlockStored(chain(10 * number, 10), ROOT)])
                if number % 3 == 0:
                    await asyncio.sleep(0.001)
            client = host.registry._client
            await _until_async(lambda: client.hget("shoal:kv:state:d0", "seq"), b"200")
            assert await client.smembers("shoal:kv:blocks:d0") == set(chain(0, 2000))
            await worker.stop()
            host.workers.remove(worker)
            await _until_async(lambda: client.exists("shoal:kv:blocks:d0"), 0)


async def test_with_nats_down_requests_are_placed_by_load_and_with_nats_back_by_what_was_stored_meanwhile(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        one, two = await host.worker("d0"), await host.worker("d1")
        with host.router("router-0", *NO_GUESS):
            await host.routers_up("router-0")
            one.publisher.publish([BlockStored(PREFIX[:40], ROOT)])
            await host.hits("d0", 640)
            nats.kill()
            one.load.num_running = one.load.num_waiting = 6
            one.load.num_waiting_tokens = 50_000
            await until(lambda: one.num_load_calls > 1 and two.num_load_calls > 1)  # asked, as they cannot tell
            for _ in range(5):
                told = await _last(host)
                assert told.degraded == ["nats down"]
                chosen = told.candidates[told.chosen]
                assert (chosen.decode_worker_id, chosen.cached_tokens) == ("d1", 0)
            two.publisher.publish([BlockStored(PREFIX, ROOT)])
            await asyncio.sleep(0.5)
            nats.start()
            await host.hits("d1", 1600)


async def test_with_redis_down_hits_are_found_from_memory_and_new_events_still_count(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        one, two = await host.worker("d0"), await host.worker("d1")
        with host.router("router-0", *NO_GUESS):
            await host.routers_up("router-0")
            one.publisher.publish([BlockStored(PREFIX[:40], ROOT)])
            await host.hits("d0", 640)
            valkey.kill()
            two.publisher.publish([BlockStored(PREFIX, ROOT)])
            await host.hits("d1", 1600)
            await asyncio.sleep(1)
            assert (await host.explain((await _last(host)).request_id)).degraded == ["redis down"]
            valkey.start()
            client = host.registry._client
            await _until_async(lambda: client.scard("shoal:kv:blocks:d1"), len(PREFIX))


async def test_a_decision_is_explained_with_its_candidates_and_later_with_what_really_happened(
    nats: RealServer, valkey: RealServer
) -> None:
    async with host_on(nats, valkey) as host:
        await host.worker("d0", role="decode")
        await host.worker("p0", service="prefill", role="prefill")
        with host.router("router-0"):
            await host.routers_up("router-0")
            await until(lambda: len(host.directory.all("prefill")) == 1)
            placement = await host.client.route(LONG)
            assert (placement.decode_worker_id, placement.prefill_worker_id) == ("d0", "p0")
            assert placement.prefill_address == host.directory.all("prefill")[0].address
            told = await host.explain("r1")
            assert [(c.decode_worker_id, c.prefill_worker_id, c.source) for c in told.candidates] == [
                ("d0", "", "local"), ("d0", "p0", "remote-prefill")]
            assert told.chosen == 1
            assert told.candidates[1].predicted_ttft_s == placement.predicted_ttft_s
            assert "role decode" in told.candidates[0].rejected_because
            assert not told.HasField("outcome")
            await host.client.publish(RequestOutcome(
                "r1", MODEL, placement.decision_id, "d0", "p0", ttft_s=0.5, finish_reason="stop"))
            async with asyncio.timeout(10):
                while not (told := await host.explain("r1")).HasField("outcome"):
                    await asyncio.sleep(0.02)
            assert told.outcome.ttft_s == 0.5
            with pytest.raises(NotFound):
                await host.explain("never seen")


async def _last(host: Host) -> router_pb2.ExplainResponse:
    """A decision made just now."""
    request_id = f"l{time.monotonic_ns()}"
    await host.client.route(replace(LONG, request_id=request_id))
    return await host.explain(request_id)


async def _until_async(ask: Callable[[], object], wanted: object) -> None:
    got: object = None
    try:
        async with asyncio.timeout(15):
            while True:
                got = await ask()  # type: ignore[misc]
                if got == wanted:
                    return
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{got!r} is not {wanted!r}") from None
