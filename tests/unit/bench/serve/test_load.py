"""Whole runs of the load against a real HTTP server whose streams are scripted."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.serve import workloads
from bench.serve.connection import Endpoint
from bench.serve.load import Load
from bench.serve.options import ServeOptions
from bench.serve.prompts import Prompts
from bench.serve.record import Outcome, RequestRecord
from bench.serve.summary import summarize
from bench.serve.workloads import BenchRequest
from tests.certificates import Ca
from tests.scripted_server import Answer, Json, Reply, scripted


async def good(_number: int, _body: Json, reply: Reply) -> None:
    await reply.open()
    for word in ("a", "b", "c"):
        await reply.text(word)
    await reply.text("", "length")
    await reply.end(3)


def make(url: str, requests: Sequence[BenchRequest], **options: Any) -> tuple[Load, Endpoint]:
    asked = ServeOptions(url=url, model="m", **options)
    endpoint = Endpoint(url, asked.api_key)
    return Load(asked, endpoint, list(requests), Prompts(asked, endpoint, requests)), endpoint


async def loaded(answer: Answer, requests: Sequence[BenchRequest], **options: Any) -> list[RequestRecord]:
    async with scripted(answer) as server:
        load, endpoint = make(server.url, requests, **options)
        await load.run()
        endpoint.close()
    return load.records


def few(count: int) -> list[BenchRequest]:
    return workloads.random(count, 4, 3, 1000)


async def test_a_request_is_sent_as_asked_and_its_answer_counted_by_the_servers_usage() -> None:
    async with scripted(good) as server:
        load, endpoint = make(server.url, few(1), temperature=0.5, ignore_eos=True, extra_body={"top_k": 4},
                              api_key="secret")
        await load.run()
        endpoint.close()
        (body,) = server.bodies
    assert body == {"model": "m", "prompt": few(1)[0].prompt, "max_tokens": 3, "stream": True, "temperature": 0.5,
                    "stream_options": {"include_usage": True}, "ignore_eos": True, "top_k": 4}
    assert "Authorization: Bearer secret\r\n" in server.headers[0]
    (record,) = load.records
    assert (record.outcome, record.text, record.output_len, record.input_len) == (Outcome.COMPLETED, "abc", 3, 5)
    assert len(record.chunk_s) == 3, "the chunk with only the finish reason is no content"


async def test_the_first_token_is_the_first_content_and_not_the_headers_or_a_comment() -> None:
    async def slowly(_number: int, _body: Json, reply: Reply) -> None:
        await reply.open()
        await reply.send(": ping\n\n")
        await asyncio.sleep(0.05)
        await reply.text("a")
        await reply.end(1)

    (record,) = await loaded(slowly, few(1))
    assert record.ttft_s >= 0.049
    assert record.e2el_s >= record.ttft_s


async def test_every_way_to_end_is_counted_apart_and_only_whole_answers_are_measured() -> None:
    async def answer(number: int, _body: Json, reply: Reply) -> None:
        if number == 0:
            await reply.whole(503, '{"error": {"message": "full"}}')
        elif number == 1:
            await reply.whole(429, "slow down")
        elif number == 2:
            await reply.whole(400, "bad")
        elif number == 3:
            await reply.open()
            await reply.text("a")
            await reply.event(error={"message": "lost", "code": "worker_lost"})
            await reply.end(1)
        elif number == 4:
            await reply.open()
            await reply.text("a")
            reply.writer.close()
        elif number == 5:
            await reply.open()
            await reply.text("a")
            await reply.end(1, done=False)
        elif number == 6:
            await reply.open()
            await reply.text("a")
            await asyncio.sleep(60)
        elif number == 7:
            await reply.open()
            await reply.send("data: {broken\n\n")
            await reply.end(1)
        else:
            await good(number, _body, reply)

    records = await loaded(answer, few(9), max_concurrency=1, deadline_s=1.0)
    assert [record.outcome for record in records] == [
        Outcome.REFUSED, Outcome.REFUSED, Outcome.FAILED, Outcome.FAILED, Outcome.FAILED, Outcome.FAILED,
        Outcome.ABORTED, Outcome.FAILED, Outcome.COMPLETED]
    for record, needle in zip(records, ("503: ", "429: slow", "400: bad", "worker_lost: lost", "connection lost",
                                        "without [DONE]", "1 s", "cannot be read", ""), strict=True):
        assert needle in record.error
    summary = summarize(records, 1.0, (50,), {})
    assert summary.refused_by_status == {503: 1, 429: 1}
    assert (summary.completed, summary.not_completed, summary.total_output_tokens) == (1, 8, 3)
    assert summary.spreads["e2el"].mean == pytest.approx(records[-1].e2el_s * 1000)


async def test_a_server_that_is_not_there_fails_all() -> None:
    records = await loaded(good, [])
    assert records == []
    load, endpoint = make("http://127.0.0.1:9", few(2))
    await load.run()
    endpoint.close()
    assert {record.outcome for record in load.records} == {Outcome.FAILED}


async def test_events_may_be_cut_anywhere_and_end_lines_either_way() -> None:
    async def in_pieces(_number: int, _body: Json, reply: Reply) -> None:
        await reply.open()
        raw = ('data: {"choices": [{"text": "né"}]}\r\n\r\n: comment\n\ndata: {"choices": [{"text": "x"}]}\n\n'
               'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n').encode()
        for at in range(len(raw)):
            reply.writer.write(b"1\r\n%b\r\n" % raw[at:at + 1])
            await reply.writer.drain()
        reply.writer.write(b"0\r\n\r\n")

    (record,) = await loaded(in_pieces, few(1))
    assert (record.outcome, record.text, record.output_len) == (Outcome.COMPLETED, "néx", 2)


async def test_no_more_than_the_allowed_requests_are_under_way_and_waiting_for_a_slot_is_no_lag() -> None:
    under_way = most = 0

    async def answer(number: int, body: Json, reply: Reply) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1
        await good(number, body, reply)

    async with scripted(answer) as server:
        load, endpoint = make(server.url, few(6), max_concurrency=2)
        await load.run()
        endpoint.close()
        assert server.num_connections == 2, "connections are kept for the next request"
    assert most == 2
    late = load.records[-1]
    assert late.queue_s >= 0.09
    assert late.due_s == pytest.approx(late.queue_s)


async def test_requests_leave_at_their_arrival_however_long_others_take() -> None:
    async def answer(number: int, body: Json, reply: Reply) -> None:
        await asyncio.sleep(0.3)
        await good(number, body, reply)

    requests = [BenchRequest([300], 1, at) for at in (0.0, 0.05, 0.1)]
    records = await loaded(answer, requests)
    assert [record.due_s for record in records] == [0.0, 0.05, 0.1]
    assert all(record.sent_s >= record.due_s for record in records)
    assert records[2].sent_s < records[0].end_s


async def test_a_turn_brings_the_conversation_with_the_tokens_that_were_answered() -> None:
    async def answer(number: int, _body: Json, reply: Reply) -> None:
        await reply.open()
        await reply.event(choices=[{"text": "x", "token_ids": [7000 + number, 8000 + number]}])
        await reply.end(2)

    requests = workloads.multi_turn(1, 3, prefix_len=4, user_len=2, output_len=2, think_s=0.01)
    async with scripted(answer) as server:
        load, endpoint = make(server.url, requests)
        await load.run()
        endpoint.close()
    first, second, third = (list(request.prompt) for request in requests)
    assert [body["prompt"] for body in server.bodies] == [
        first, [*first, 7000, 8000, *second], [*first, 7000, 8000, *second, 7001, 8001, *third]]
    assert all(body["return_token_ids"] for body in server.bodies)
    for before, record in pairwise(load.records):
        assert record.due_s == pytest.approx(before.end_s + 0.01), "the user thinks after the answer's end"
    assert all(record.outcome is Outcome.COMPLETED for record in load.records)


async def test_turns_after_one_that_did_not_complete_are_not_sent() -> None:
    async def answer(_number: int, _body: Json, reply: Reply) -> None:
        await reply.whole(503, "full")

    records = await loaded(answer, workloads.multi_turn(2, 3, 4, 2, 2))
    assert [record.outcome for record in records] == [Outcome.REFUSED, Outcome.NOT_SENT, Outcome.NOT_SENT] * 2


async def test_a_conversation_over_a_server_without_token_ids_says_what_to_do() -> None:
    records = await loaded(good, workloads.multi_turn(1, 2, 4, 2, 2))
    assert [record.outcome for record in records] == [Outcome.COMPLETED, Outcome.NOT_SENT]
    assert "openai-chat" in records[1].error


async def test_a_stopped_run_keeps_what_is_done_and_counts_the_rest() -> None:
    async def answer(number: int, body: Json, reply: Reply) -> None:
        if number == 0:
            await good(number, body, reply)
        else:
            load.stop("enough")
            await asyncio.sleep(60)

    async with scripted(answer) as server:
        load, endpoint = make(server.url, few(4), max_concurrency=1)
        await load.run()
        endpoint.close()
    assert [record.outcome for record in load.records] == [
        Outcome.COMPLETED, Outcome.INTERRUPTED, Outcome.NOT_SENT, Outcome.NOT_SENT]
    assert load.stopped_by == "enough"


async def test_the_time_of_a_run_is_bounded() -> None:
    async def never(_number: int, _body: Json, _reply: Reply) -> None:
        await asyncio.sleep(60)

    async with scripted(never) as server:
        load, endpoint = make(server.url, few(1), max_seconds=0.2)
        await load.run()
        endpoint.close()
    assert "--max-seconds 0.2" in load.stopped_by
    assert load.records[0].outcome is Outcome.INTERRUPTED


async def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_failure() -> None:
    async def answer(number: int, body: Json, reply: Reply) -> None:
        await good(number, body, reply)
        if number == 0:
            reply.writer.close()

    async with scripted(answer) as server:
        load, endpoint = make(server.url, few(3), max_concurrency=1)
        await load.run()
        endpoint.close()
    assert {record.outcome for record in load.records} == {Outcome.COMPLETED}
    assert server.num_connections == 2


async def test_a_request_that_a_live_server_cut_before_its_first_byte_has_failed() -> None:
    async def answer(number: int, body: Json, reply: Reply) -> None:
        if number == 1:
            await asyncio.sleep(0.1)  # it works on the prompt, and dies
            reply.writer.close()
        else:
            await good(number, body, reply)

    records = await loaded(answer, few(3), max_concurrency=1)
    assert [record.outcome for record in records] == [Outcome.COMPLETED, Outcome.FAILED, Outcome.COMPLETED]
    assert "connection lost" in records[1].error
    assert [record.num_resent for record in records] == [0, 0, 0]


async def test_a_stale_connection_is_one_that_ends_right_after_the_request_was_written() -> None:
    async def answer(number: int, body: Json, reply: Reply) -> None:
        if number == 1:
            reply.writer.transport.abort()  # as one that had been closed: the client could not see it yet
        else:
            await good(number, body, reply)

    records = await loaded(answer, few(3), max_concurrency=1)
    assert {record.outcome for record in records} == {Outcome.COMPLETED}
    assert [record.num_resent for record in records] == [0, 1, 0]
    assert summarize(records, 1.0, (50,), {}).num_resent == 1


@pytest.mark.parametrize(("text", "outcome", "error"), [
    ("a", Outcome.COMPLETED, ""), ("", Outcome.FAILED, "the stream brought no content")])
async def test_a_whole_stream_without_its_last_bytes_is_judged_by_what_it_brought(
    text: str, outcome: Outcome, error: str
) -> None:
    async def answer(_number: int, _body: Json, reply: Reply) -> None:
        await reply.open()
        await reply.text(text)
        await reply.send("data: [DONE]\n\n")
        reply.writer.close()

    (record,) = await loaded(answer, few(1))
    assert (record.outcome, record.status, record.error) == (outcome, 200, error)


async def test_an_https_server_is_known_by_the_deployments_ca(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = Ca(tmp_path)
    cert, key = ca.issue("gateway")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with scripted(good, context) as server:
        for name, outcome in (("", Outcome.FAILED), (str(ca.path), Outcome.COMPLETED)):
            monkeypatch.setenv("SHOAL_TLS_CA", name)
            load, endpoint = make(server.url, few(1))
            await load.run()
            endpoint.close()
            assert load.records[0].outcome is outcome


async def test_chat_sends_text_and_reads_deltas() -> None:
    async def answer(_number: int, _body: Json, reply: Reply) -> None:
        await reply.open()
        await reply.event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        await reply.event(choices=[{"delta": {"reasoning_content": "hm "}}])
        await reply.event(choices=[{"delta": {"content": "yes"}}])
        await reply.event(choices=[{"delta": {}, "finish_reason": "stop"}])
        await reply.end(2)

    async with scripted(answer) as server:
        load, endpoint = make(server.url, [BenchRequest("why?", 3)], endpoint_type="openai-chat")
        await load.run()
        endpoint.close()
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "why?"}]
    assert "POST /v1/chat/completions " in server.headers[0]
    (record,) = load.records
    assert (record.text, len(record.chunk_s), record.outcome) == ("hm yes", 2, Outcome.COMPLETED)
