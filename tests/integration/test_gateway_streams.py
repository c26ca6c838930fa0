"""Streams of the gateway over real HTTP in front of fakes: one ending each, cancelled at once, bounded in memory."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from common.errors import Unavailable, WorkerLost
from common.generation import FinishReason, TokenDelta
from tests.fakes import MODEL, FakeDecode, FakeTokenizer, says
from tests.http_gateway import M0, HttpGateway, events, http_gateway, text_of, until

LONG = "naïve 🙂🌶️ 日本語 " * 5


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway() as running:
        yield running


def endings(chunks: list[Any]) -> list[str]:
    """What ended a stream: `finish`, `done`, `error`, in order."""
    out = []
    for chunk in chunks:
        if chunk == "[DONE]":
            out.append("done")
        elif "error" in chunk:
            out.append("error")
        elif any(c["finish_reason"] for c in chunk["choices"]):
            out.append("finish")
    return out


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("max_tokens", [300, 31, 7, 1])
@pytest.mark.parametrize("per_step", [1, 3])
async def test_streamed_and_whole_text_and_usage_are_equal_wherever_the_cut_falls(
    gateway: HttpGateway, endpoint: str, max_tokens: int, per_step: int
) -> None:
    gateway.decode.script = says(LONG, per_step=per_step)
    ask = getattr(gateway, endpoint)
    whole = (await ask(max_tokens=max_tokens)).json()
    answer = await ask(max_tokens=max_tokens, stream=True, stream_options={"include_usage": True})
    chunks = events(answer.text)
    choice = whole["choices"][0]
    assert text_of(chunks) == (choice["text"] if endpoint == "complete" else choice["message"]["content"])
    assert endings(chunks) == ["finish", "done"]
    assert chunks[-2]["usage"] == whole["usage"]
    assert chunks[-3]["choices"][0]["finish_reason"] == choice["finish_reason"]


async def test_a_stream_of_a_chat_has_the_contracted_chunks_and_headers(gateway: HttpGateway) -> None:
    answer = await gateway.chat(max_tokens=50, stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"]
    chunks = events(answer.text)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks[:-1]}) == 1
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:-1])


@pytest.mark.parametrize(("options", "expected"), [
    (None, "absent"), ({}, "absent"), ({"include_usage": False}, "absent"), ({"include_usage": None}, "absent"),
    ({"continuous_usage_stats": True}, "absent"), ({"include_usage": True}, "last"),
    ({"include_usage": True, "continuous_usage_stats": True}, "all")])
async def test_usage_is_sent_exactly_when_asked_for(gateway: HttpGateway, options: Any, expected: str) -> None:
    chunks = events((await gateway.chat(max_tokens=50, stream=True, stream_options=options)).text)[:-1]
    if expected == "absent":
        assert all("usage" not in c for c in chunks)
        return
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    others = [c["usage"] for c in chunks[:-1]]
    if expected == "last":
        assert others == [None] * len(others)
    else:
        assert [u["completion_tokens"] for u in others] == [1, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_step", [1, 4])
async def test_a_stop_string_over_several_tokens_never_shows_and_ends_the_work(stream: bool, per_step: int) -> None:
    decode = FakeDecode(script=says("ABCDEFGHIJKLMNOPQRST", per_step=per_step))
    async with http_gateway(decode) as gateway:
        answer = await gateway.complete(max_tokens=100, stop=["DEFGHIJ"], stream=stream,
                                        **({"stream_options": {"include_usage": True}} if stream else {}))
        if stream:
            chunks = events(answer.text)
            text, usage = text_of(chunks), chunks[-2]["usage"]
            finish = chunks[-3]["choices"][0]
        else:
            finish, usage = answer.json()["choices"][0], answer.json()["usage"]
            text = finish["text"]
        assert text == "ABC"
        assert (finish["finish_reason"], finish["stop_reason"]) == ("stop", "DEFGHIJ")
        assert usage["completion_tokens"] == 10  # up to the token that completed the stop, not to the end of its step
        assert len(decode.aborted) == 1
        assert decode.num_tokens_sent <= 12


@pytest.mark.parametrize("stream", [False, True])
async def test_text_held_back_for_a_stop_that_does_not_come_is_released(stream: bool) -> None:
    async with http_gateway(FakeDecode(script=says("ABCDEFGX"))) as gateway:
        answer = await gateway.complete(max_tokens=100, stop="DEFGHIJ", stream=stream)
        text = text_of(events(answer.text)) if stream else answer.json()["choices"][0]["text"]
        assert text == "ABCDEFGX"
        answer = await gateway.complete(max_tokens=7, stop="DEFGHIJ", stream=stream)
        text = text_of(events(answer.text)) if stream else answer.json()["choices"][0]["text"]
        assert text == "ABCDEFG"


async def test_a_stop_token_is_counted_not_shown_unless_asked_for(gateway: HttpGateway) -> None:
    def script(_worker: str, generation: Any) -> list[Any]:
        return [b"ab", TokenDelta(generation.request_id, (99, 100), FinishReason.STOP, stop_token_id=100)]

    gateway.decode.script = script
    body = (await gateway.complete(stop_token_ids=[100])).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("abc", 4)
    assert body["choices"][0]["stop_reason"] == 100
    body = (await gateway.complete(stop_token_ids=[100], include_stop_str_in_output=True)).json()
    assert body["choices"][0]["text"] == "abcd"


@pytest.mark.parametrize("step", [
    WorkerLost("the worker is gone"), TokenDelta("", (), FinishReason.ABORT),
    TokenDelta("", (), FinishReason.ERROR, WorkerLost("engine fault"))])
async def test_the_only_worker_lost_after_tokens_ends_a_stream_in_one_error_event(
    gateway: HttpGateway, step: Any
) -> None:
    gateway.decode.script = lambda _w, _g: [b"ab", step]
    answer = await gateway.chat(max_tokens=50, stream=True)
    chunks = events(answer.text)
    assert answer.status_code == 200
    assert endings(chunks) == ["error"]
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert len(gateway.decode.placed) == 1
    assert (await gateway.chat(max_tokens=50)).status_code == 503


async def test_a_fault_of_ours_after_tokens_ends_the_stream_in_one_error_event(gateway: HttpGateway) -> None:
    gateway.decode.script = lambda _w, _g: [b"ab", [70000]]  # a token the fake text cannot decode
    chunks = events((await gateway.chat(max_tokens=50, stream=True)).text)
    assert endings(chunks) == ["error"]
    assert chunks[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("stage", ["tokenizing", "before the first token", "between tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_the_work_at_every_stage(stage: str, stream: bool) -> None:
    tokenizer, decode = FakeTokenizer(), FakeDecode()
    if stage == "tokenizing":
        tokenizer.hold = asyncio.Event()
    decode.script = lambda _w, _g: ([b"ab"] if stage == "between tokens" else []) + [asyncio.Event()]
    async with http_gateway(decode, tokenizer) as gateway:
        _reader, writer = await gateway.raw("/v1/chat/completions", {**M0, "stream": stream, "max_tokens": 50})
        await until(lambda: gateway.admission.num_running == 1, "the request is in work")
        if stage != "tokenizing":
            await until(lambda: decode.generations, "the request is at the worker")
        if stage == "between tokens":
            await until(lambda: decode.num_tokens_sent == 2, "tokens were sent")
        writer.close()
        await writer.wait_closed()
        await until(lambda: gateway.admission.num_running == 0, "the slot is free")
        assert decode.aborted == {g.request_id for g in decode.generations}
        tokenizer.hold, decode.script = None, says("ok")
        assert await gateway.alive()


async def test_cancelling_one_of_two_requests_with_one_request_id_leaves_the_other(gateway: HttpGateway) -> None:
    gate = asyncio.Event()
    gateway.decode.script = lambda _w, g: [list(g.prompt_token_ids[-3:]), gate]
    header = {"x-request-id": "twin"}
    first = asyncio.create_task(gateway.chat(header, messages=[{"role": "user", "content": "one"}], max_tokens=9))
    second = asyncio.create_task(gateway.chat(header, messages=[{"role": "user", "content": "two"}], max_tokens=9))
    await until(lambda: gateway.decode.num_tokens_sent == 6, "both have begun")
    first.cancel()
    await until(lambda: len(gateway.decode.aborted) == 1, "the first is aborted")
    gate.set()
    assert (await second).json()["choices"][0]["message"]["content"] == "two"


async def test_a_reader_that_does_not_read_costs_bounded_memory_and_loses_nothing() -> None:
    num_chunks, step = 7000, b"x" * 1000  # more than the kernel keeps for a socket
    decode = FakeDecode(script=lambda _w, _g: [step] * num_chunks, max_model_len=100_000_000)
    async with http_gateway(decode, stream_buffer_bytes=4096) as gateway:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", gateway.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=8192)
        body = b'{"model":"%s","prompt":"x","stream":true,"max_tokens":50000000}' % MODEL.encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
                     b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        before = -1
        while before != decode.num_tokens_sent or before <= 0:  # until the worker's iterator is no longer read
            before = decode.num_tokens_sent
            await asyncio.sleep(0.2)
        assert before < num_chunks * len(step)  # the pipeline waits for the reader
        received = await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        assert received.count(step) == num_chunks
        assert received.count(b"data: [DONE]") == 1


async def test_silence_in_an_open_stream_is_broken_by_comments() -> None:
    gate = asyncio.Event()
    async with http_gateway(FakeDecode(script=lambda _w, _g: [b"a", gate, b"b"]), ping_s=0.05) as gateway:
        body = ""
        async with gateway.client.stream("POST", "/v1/chat/completions", json={**M0, "stream": True}) as answer:
            async for text in answer.aiter_text():
                body += text
                if body.count(": ping") >= 2:
                    gate.set()
        assert text_of(events(body)) == "ab"
        assert endings(events(body)) == ["finish", "done"]


async def test_a_full_gateway_refuses_at_once_and_recovers() -> None:
    gate = asyncio.Event()
    async with http_gateway(FakeDecode(script=lambda _w, _g: [b"a", gate]), max_concurrent_requests=1) as gateway:
        running = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: gateway.admission.num_running == 1, "one runs")
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        assert answer.headers["retry-after"] == "1"
        gate.set()
        assert endings(events((await running).text)) == ["finish", "done"]
        assert (await gateway.chat()).status_code == 200


async def test_half_sent_bodies_hold_no_slots() -> None:
    async with http_gateway(max_concurrent_requests=2) as gateway:
        writers = []
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            _reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                         "Content-Length: 100\r\n\r\n{".encode())
            await writer.drain()
            writers.append(writer)
        await asyncio.sleep(0.1)
        assert (await gateway.chat()).status_code == 200
        for writer in writers:
            writer.close()


async def test_bodies_in_reading_have_a_bound_of_their_own() -> None:
    async with http_gateway(max_bodies_at_once=1) as gateway:
        _reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
                     b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        answer = await gateway.chat()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
        assert (await gateway.chat()).status_code == 200


async def test_a_drain_lets_streams_finish_and_refuses_new_ones(gateway: HttpGateway) -> None:
    gate = asyncio.Event()
    gateway.decode.script = lambda _w, _g: [b"a", gate, b"b"]
    running = asyncio.create_task(gateway.chat(stream=True))
    await until(lambda: gateway.decode.num_tokens_sent == 1, "the stream has begun")
    gateway.admission.start_drain()
    assert (await gateway.client.get("/ready")).status_code == 503
    assert (await gateway.chat()).status_code == 503
    idle = asyncio.create_task(gateway.admission.idle())
    gate.set()
    chunks = events((await running).text)
    assert (text_of(chunks), endings(chunks)) == ("ab", ["finish", "done"])
    await asyncio.wait_for(idle, 5)


async def test_past_the_drain_limit_streams_end_in_an_error_event_and_others_in_503(gateway: HttpGateway) -> None:
    gateway.decode.script = lambda _w, _g: [b"a", asyncio.Event()]
    whole = asyncio.create_task(gateway.chat())
    body = {**M0, "stream": True}
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as streaming:  # its head has arrived
        await until(lambda: gateway.decode.num_tokens_sent == 2, "both have begun")
        gateway.admission.cut(Unavailable("this gateway is shutting down"))
        chunks = events((await streaming.aread()).decode())
    assert endings(chunks) == ["error"]
    assert chunks[-1]["error"]["code"] == "service_unavailable"
    assert (await whole).status_code == 503
    assert len(gateway.decode.aborted) == 2


async def test_the_deadline_of_an_open_stream_is_an_error_event() -> None:
    decode = FakeDecode(script=lambda _w, _g: [b"a", asyncio.Event()])
    async with http_gateway(decode, request_timeout_s=0.3) as gateway:
        chunks = events((await gateway.chat(stream=True)).text)
        assert endings(chunks) == ["error"]
        assert chunks[-1]["error"]["code"] == "deadline_exceeded"
        assert decode.aborted


async def test_the_read_timeout_bounds_the_first_byte_of_a_stream_and_not_its_length() -> None:
    gate = asyncio.Event()
    async with http_gateway(FakeDecode(script=lambda _w, _g: [b"a", gate, b"b"])) as gateway:
        running = asyncio.create_task(gateway.chat({"x-stainless-read-timeout": "0.2"}, stream=True))
        await asyncio.sleep(0.4)
        gate.set()
        assert endings(events((await running).text)) == ["finish", "done"]


async def test_the_openai_client_streams_async_and_sync_and_sees_errors(gateway: HttpGateway) -> None:
    gateway.decode.script = says(LONG)
    options: Any = {"model": MODEL, "messages": M0["messages"], "stream": True, "max_tokens": 400,
                    "stream_options": {"include_usage": True}}
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(**options)]
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == LONG
        assert chunks[-1].usage.completion_tokens == len(LONG.encode()) + 1
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**{**options, "model": "nope"})
        assert missing.value.code == "model_not_found"

    def use_sync() -> str:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
            chunks = list(client.chat.completions.create(**options))
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

    assert await asyncio.to_thread(use_sync) == LONG
    gateway.decode.script = lambda _w, _g: [b"ab", WorkerLost("gone")]
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in await client.chat.completions.create(**options):
                pass
