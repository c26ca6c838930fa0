"""The gateway's long stream to a worker breaks and comes back: no command is lost to a stream that has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from common import rpc
from common.bus import MemoryBus
from common.clients import decode
from common.clients.decode import DecodeClient
from common.clients.generate import delta_to_proto
from common.directory import Directory
from common.errors import InvalidRequest, Overloaded, ShoalError, WorkerLost
from common.generation import FinishReason, Generation, TokenDelta
from common.registry import MemoryRegistry
from common.sampling_params import SamplingParams
from common.service_record import Fingerprint, ServiceRecord
from proto import decode_pb2, decode_pb2_grpc

PRINT = Fingerprint("m", "r", "float32", 16, 1, 1, 8)


class EndingWorker(decode_pb2_grpc.DecodeServicer):
    """Answers each submit with its end, or refuses it; `cut` ends the stream itself, `answers` unset holds it up."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.cut, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.refusal: ShoalError | None = None
        self.num_streams = 0
        self.heartbeat_s: float | None = None

    async def Generate(  # type: ignore[no-untyped-def]  # noqa: N802
        self, request_iterator, context
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        await context.send_initial_metadata(())
        self.num_streams += 1
        out: asyncio.Queue[decode_pb2.StepBatch | None] = asyncio.Queue()

        async def read() -> None:
            async for command in request_iterator:
                self.seen.append(command.submit.request_id)
                await self.answers.wait()
                delta = TokenDelta(command.submit.request_id, (1,), FinishReason.LENGTH)
                if self.refusal is not None:
                    delta = replace(delta, token_ids=(), finish_reason=FinishReason.ERROR, error=self.refusal)
                await out.put(decode_pb2.StepBatch(deltas=[delta_to_proto(delta)]))

        async def wait_for_cut() -> None:
            await self.cut.wait()
            await out.put(None)

        async def beat() -> None:
            while self.heartbeat_s is not None:
                await asyncio.sleep(self.heartbeat_s)
                await out.put(decode_pb2.StepBatch())

        tasks = [asyncio.create_task(each) for each in (read(), wait_for_cut(), beat())]
        try:
            while (batch := await out.get()) is not None:
                yield batch
        finally:
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def connected(worker: EndingWorker) -> AsyncIterator[DecodeClient]:
    server = rpc.new_server()
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    registry = MemoryRegistry()
    await registry.register(ServiceRecord(
        "decode", "d", "i", f"127.0.0.1:{port}", models=("m",), fingerprint=PRINT, capacity={"max_model_len": 9}), 60)
    directory = Directory(registry)
    await directory.start()
    client = DecodeClient(directory, MemoryBus())
    await client.start()
    await client.wait_for_workers("m", 5)
    try:
        yield client
    finally:
        await client.stop()
        await directory.stop()
        await server.stop(0)


async def ask(client: DecodeClient, name: str, n: int = 1) -> int:
    generation = Generation(name, "m", (1, 2), (), SamplingParams(max_tokens=1, n=n))
    return sum([len(d.token_ids) async for d in client.generate("d", generation)])


async def test_commands_after_a_reconnect_reach_the_new_stream() -> None:
    worker = EndingWorker()
    async with connected(worker) as client:
        assert await ask(client, "first") == 1
        for turn in range(3):
            worker.cut.set()
            while client.workers("m"):
                await asyncio.sleep(0.01)
            worker.cut = asyncio.Event()
            assert [view.connection for view in await client.wait_for_workers("m", 5)] == [turn + 2]
            assert await ask(client, f"again-{turn}") == 1
    assert worker.seen == ["first", "again-0", "again-1", "again-2"]


async def test_a_loop_that_stood_still_reads_on_and_gives_no_worker_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "STALL_S", 1.2)
    worker = EndingWorker()
    worker.heartbeat_s = 0.1
    worker.answers.clear()
    async with connected(worker) as client:
        asking = asyncio.create_task(ask(client, "r"))
        while not worker.seen:
            await asyncio.sleep(0.01)
        time.sleep(1.5)  # noqa: ASYNC251  # the stall that is meant
        worker.answers.set()
        assert await asking == 1
    assert worker.num_streams == 1


async def test_a_worker_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "STALL_S", 0.3)
    worker = EndingWorker()
    worker.answers.clear()
    async with connected(worker) as client, asyncio.timeout(20):
        with pytest.raises(WorkerLost):
            await ask(client, "r")


async def test_a_request_is_in_flight_as_often_as_it_has_choices() -> None:
    worker = EndingWorker()
    worker.answers.clear()
    async with connected(worker) as client:
        asking = [asyncio.create_task(ask(client, name, n)) for name, n in (("one", 1), ("many", 5))]
        while len(worker.seen) < 1:
            await asyncio.sleep(0.01)
        assert [view.num_in_flight for view in client.workers("m")] == [6]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert [view.num_in_flight for view in client.workers("m")] == [0]


async def test_a_worker_that_still_holds_the_request_of_a_broken_stream_is_full_and_the_client_at_no_fault() -> None:
    worker = EndingWorker()
    worker.refusal = InvalidRequest("request_id: in use by a live request", param="request_id")
    async with connected(worker) as client:
        with pytest.raises(Overloaded):
            await ask(client, "r")
