"""What one request may cost the gateway's other requests: time on the event loop, memory for a reader, slots."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import pytest

from common import rpc
from common.bus import MemoryBus
from common.clients.decode import DecodeClient
from common.clients.delta_inbox import MAX_UNREAD_LOGPROBS
from common.directory import Directory
from common.errors import ReaderTooSlow
from common.generation import Generation
from common.registry import MemoryRegistry
from common.sampling_params import SamplingParams
from common.service_record import Fingerprint, ServiceRecord
from common.tokenized import TokenText
from proto import common_pb2, decode_pb2, decode_pb2_grpc
from tests.fakes import FakeDecode, FakeTokenizer, says
from tests.http_gateway import events, http_gateway, until

LONG = "abcdefgh" * 100


class Seen(bytes):
    """Bytes of a token that note in which threads they are read."""

    threads: ClassVar[set[int]] = set()

    def decode(self, *args: Any, **kwargs: Any) -> str:
        Seen.threads.add(threading.get_ident())
        return super().decode(*args, **kwargs)


class SeenTexts(FakeTokenizer):
    async def token_texts(self, model: str, token_ids: Sequence[int]) -> list[TokenText]:
        return [TokenText(Seen(text.raw), text.is_special) for text in await super().token_texts(model, token_ids)]


@pytest.mark.parametrize("asked", [
    {"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}, {"echo": True, "logprobs": 2, "stream": True}])
@pytest.mark.parametrize("n", [1, 2])
async def test_logprobs_of_a_long_prompt_are_shaped_off_the_event_loop(asked: dict[str, Any], n: int) -> None:
    Seen.threads.clear()
    async with http_gateway(FakeDecode(says("x"), max_model_len=4096), SeenTexts()) as gateway:
        answer = await gateway.complete(LONG, max_tokens=1, n=n, **asked)
        assert answer.status_code == 200
        assert Seen.threads
        assert threading.get_ident() not in Seen.threads
        bodies = events(answer.text)[:-1] if asked.get("stream") else [answer.json()]
        found: dict[int, list[Any]] = {index: [] for index in range(n)}
        for choice in (choice for body in bodies for choice in body["choices"]):
            found[choice["index"]] += choice.get("prompt_logprobs") or (choice["logprobs"] or {}).get("tokens", [])
        assert all(len(entries) in (len(LONG), len(LONG) + 1) for entries in found.values())


async def test_a_chats_prompt_logprobs_are_shaped_off_the_event_loop() -> None:
    Seen.threads.clear()
    async with http_gateway(FakeDecode(says("x"), max_model_len=4096), SeenTexts()) as gateway:
        answer = await gateway.chat(messages=[{"role": "user", "content": LONG}], prompt_logprobs=2, n=2)
        assert len(answer.json()["prompt_logprobs"]) > len(LONG)
        assert Seen.threads
        assert threading.get_ident() not in Seen.threads


async def test_too_many_logprobs_of_prompts_are_refused_by_name() -> None:
    async with http_gateway(FakeDecode(max_model_len=4096)) as gateway:
        answer = await gateway.complete("x" * 1600, prompt_logprobs=20, n=64, max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
        assert gateway.decode.generations == []
        assert await gateway.alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_a_request_count_among_those_in_work(stream: bool) -> None:
    gate = asyncio.Event()
    async with http_gateway(FakeDecode(lambda _w, _g: [b"a", gate]), max_concurrent_requests=8) as gateway:
        running = asyncio.create_task(gateway.complete(["A", "B"], n=3, stream=stream))
        await until(lambda: len(gateway.decode.generations) == 2, "it runs")
        refused = await gateway.chat(n=3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert refused.headers["retry-after"] == "1"
        assert len(gateway.decode.generations) == 2
        gate.set()
        assert (await running).status_code == 200
        assert (await gateway.chat(n=64)).status_code == 200
        assert gateway.admission.num_running == 0


class Talking(decode_pb2_grpc.DecodeServicer):
    """Sends logprobs of a request named `long` without end, until told to stop; ends any other with one token."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    async def Generate(  # type: ignore[no-untyped-def]  # noqa: N802
        self, request_iterator, context
    ) -> AsyncIterator[decode_pb2.StepBatch]:
        await context.send_initial_metadata(())
        short: asyncio.Queue[str] = asyncio.Queue()
        talks = asyncio.Event()

        async def read() -> None:
            async for command in request_iterator:
                if command.HasField("abort"):
                    self.aborted.append(command.abort.request_id)
                    talks.clear()
                elif command.submit.request_id == "long":
                    talks.set()
                else:
                    short.put_nowait(command.submit.request_id)

        scores = [decode_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=range(20), top_logprobs=[-1.0] * 20)] * 500
        reading = asyncio.create_task(read())
        try:
            while True:
                if talks.is_set():
                    yield decode_pb2.StepBatch(deltas=[decode_pb2.RequestDelta(
                        request_id="long", token_ids=[1] * 500, logprobs=scores)])
                elif not short.empty():
                    yield decode_pb2.StepBatch(deltas=[decode_pb2.RequestDelta(
                        request_id=short.get_nowait(), token_ids=[1], finish_reason=common_pb2.FINISH_REASON_LENGTH)])
                await asyncio.sleep(0.001)
        finally:
            reading.cancel()


async def test_a_request_whose_reader_does_not_read_is_stopped_at_its_worker_and_those_beside_it_go_on() -> None:
    worker, server = Talking(), rpc.new_server()
    decode_pb2_grpc.add_DecodeServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    registry = MemoryRegistry()
    await registry.register(ServiceRecord(
        "decode", "d", "i", f"127.0.0.1:{port}", models=("m",), capacity={"max_model_len": 9},
        fingerprint=Fingerprint("m", "r", "float32", 16, 1, 1, 8)), 60)
    directory = Directory(registry)
    await directory.start()
    client = DecodeClient(directory, MemoryBus())
    await client.start()
    await client.wait_for_workers("m", 5)

    def generate(name: str) -> Any:
        params = SamplingParams(max_tokens=10**6, logprobs=20)
        return client.generate("d", Generation(name, "m", (1, 2), (), params))

    stream = generate("long")
    first = await anext(stream)
    assert len(first.logprobs) * 21 <= MAX_UNREAD_LOGPROBS
    await until(lambda: worker.aborted == ["long"], "the worker is told")
    assert [len(delta.token_ids) async for delta in generate("short")] == [1]
    with pytest.raises(ReaderTooSlow):
        async for _ in stream:
            pass
    assert worker.aborted == ["long"]
    await client.stop()
    await directory.stop()
    await server.stop(0)
