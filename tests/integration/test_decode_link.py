"""The gateway's long stream to a worker breaks and comes back: no command is lost to a stream that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from common import rpc
from common.bus import MemoryBus
from common.clients.decode import DecodeClient
from common.directory import Directory
from common.generation import Generation
from common.registry import MemoryRegistry
from common.sampling_params import SamplingParams
from common.service_record import Fingerprint, ServiceRecord
from proto import common_pb2, decode_pb2, decode_pb2_grpc

PRINT = Fingerprint("m", "r", "float32", 16, 1, 1, 8)


class EndingWorker(decode_pb2_grpc.DecodeServicer):
    """Answers each submit with its end; `cut` ends the stream itself."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.cut = asyncio.Event()

    async def Generate(  # type: ignore[no-untyped-def]  # noqa: N802
        self, request_iterator, context
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        await context.send_initial_metadata(())
        out: asyncio.Queue[decode_pb2.StepBatch | None] = asyncio.Queue()

        async def read() -> None:
            async for command in request_iterator:
                self.seen.append(command.submit.request_id)
                await out.put(decode_pb2.StepBatch(deltas=[decode_pb2.RequestDelta(
                    request_id=command.submit.request_id, token_ids=[1],
                    finish_reason=common_pb2.FINISH_REASON_LENGTH)]))

        async def wait_for_cut() -> None:
            await self.cut.wait()
            await out.put(None)

        tasks = [asyncio.create_task(read()), asyncio.create_task(wait_for_cut())]
        try:
            while (batch := await out.get()) is not None:
                yield batch
        finally:
            for task in tasks:
                task.cancel()


async def test_commands_after_a_reconnect_reach_the_new_stream() -> None:
    worker, server = EndingWorker(), rpc.new_server()
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

    async def ask(name: str) -> int:
        generation = Generation(name, "m", (1, 2), (), SamplingParams(max_tokens=1))
        return sum([len(d.token_ids) async for d in client.generate("d", generation)])

    await client.wait_for_workers("m", 5)
    assert await ask("first") == 1
    for turn in range(3):
        worker.cut.set()
        while client.workers("m"):
            await asyncio.sleep(0.01)
        worker.cut = asyncio.Event()
        assert await client.wait_for_workers("m", 5)
        assert await ask(f"again-{turn}") == 1
    assert worker.seen == ["first", "again-0", "again-1", "again-2"]
    await client.stop()
    await directory.stop()
    await server.stop(0)
