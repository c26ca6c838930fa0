"""Faults that other servers shipped, tried over HTTP on real processes: shapes, texts, limits, hang-ups.

The worker's runner says the prompt again, token by token, and then ends: any text can be forced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from tests.e2e.api import Api, api_of, refusal
from tests.http_gateway import events, text_of
from tests.stack import RunningStack

CONTEXT = 1024
MAX_RUNNING = 4
STEP_S = 0.02
CHARACTERS = "naïve 🙂🌶️ 日本語"
LONG = {"max_tokens": 512, "ignore_eos": True, "temperature": 0}  # about five seconds of steps


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("echo"), model=smollm2, runner="mock-echo", kvstore=0, router=0,
                      max_model_len=CONTEXT, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=8,
                      env={"SHOAL_DECODE_MOCK_STEP_S": str(STEP_S)}) as running:
        yield running


@pytest.fixture
async def api(stack: RunningStack) -> AsyncIterator[Api]:
    """Whatever a test does, no service may have had a fault that it did not expect."""
    async with api_of(stack, echoes=True) as opened:
        yield opened
    for name in ("gateway-0", "tokenizer-0", "mixed-0"):
        assert "Traceback" not in stack.log(name)


def text_in(answer: httpx2.Response, stream: bool) -> str:
    assert answer.status_code == 200, answer.text
    text: str = text_of(events(answer.text)) if stream else answer.json()["choices"][0]["text"]
    return text


def finish_in(answer: httpx2.Response, stream: bool) -> str | None:
    body = events(answer.text)[-2] if stream else answer.json()
    reason: str | None = body["choices"][0]["finish_reason"]
    return reason


async def test_characters_split_over_tokens_are_the_same_streamed_and_whole_wherever_they_are_cut(api: Api) -> None:
    """B01"""
    num_tokens = len(await api.tokens(prompt=CHARACTERS))
    assert num_tokens > len(CHARACTERS) - 4  # some characters are of several tokens
    cuts = [*range(1, num_tokens + 1), 100]
    whole = await asyncio.gather(*(api.complete(CHARACTERS, max_tokens=cut) for cut in cuts))
    streamed = await asyncio.gather(*(api.complete(CHARACTERS, max_tokens=cut, stream=True) for cut in cuts))
    for line in (line for answer in streamed for line in answer.content.split(b"\n")):
        line.decode("utf-8", "strict")
    texts = [text_in(answer, stream=False) for answer in whole]
    assert [text_in(answer, stream=True) for answer in streamed] == texts
    assert texts[-2:] == [CHARACTERS, CHARACTERS]
    assert any("\ufffd" in text for text in texts)  # a cut character is flushed, not lost
    assert all("\ufffd" not in text.rstrip("\ufffd") for text in texts)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_over_several_tokens_never_shows_and_ends_the_answer(api: Api, stream: bool) -> None:
    """B02"""
    as_characters = [(await api.tokens(prompt=c))[0] for c in "ABCDEFGHIJKL"]
    for prompt in ("ABCDEFGHIJKL", as_characters):
        answer = await api.complete(prompt, stop=["DEFGHIJ"], max_tokens=100, stream=stream)
        assert (text_in(answer, stream), finish_in(answer, stream)) == ("ABC", "stop")
    await api.comes_to_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_text_held_back_for_a_stop_string_that_does_not_come_arrives(api: Api, stream: bool) -> None:
    """B02"""
    answer = await api.complete("ABCDEFGX", stop=["DEFGHIJ"], max_tokens=100, stream=stream)
    assert text_in(answer, stream) == "ABCDEFGX"


async def test_an_output_of_no_tokens_is_an_echo_or_refused_and_harms_nobody(api: Api) -> None:
    """B03"""
    async with api.unharmed():
        echo = (await api.complete("A B C", max_tokens=0, echo=True, logprobs=1)).json()
        assert echo["choices"][0]["text"] == "A B C"
        assert echo["choices"][0]["logprobs"]["token_logprobs"][0] is None
        assert len(echo["choices"][0]["logprobs"]["tokens"]) == echo["usage"]["prompt_tokens"]
        assert echo["usage"]["completion_tokens"] == 0
        refusal(await api.complete("A B C", max_tokens=0), [400], param="max_tokens")
        refusal(await api.complete("A B C", max_tokens=-1), [400], param="max_tokens")
        for wrong in (0, -1):
            refusal(await api.chat(max_tokens=wrong), [400], param="max_tokens")
        one = (await api.chat(max_tokens=1)).json()
        assert one["usage"]["completion_tokens"] == 1
        assert one["choices"][0]["finish_reason"] == "length"


async def messages_of(api: Api, num_tokens: int) -> list[dict[str, str]]:
    """A conversation of exactly that many tokens."""
    def said(count: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": " a" * count}]

    base = len(await api.tokens(messages=said(1))) - 1
    messages = said(num_tokens - base)
    assert len(await api.tokens(messages=messages)) == num_tokens
    return messages


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_is_refused_with_both_numbers_and_never_cut(api: Api, stream: bool) -> None:
    """B04"""
    drawn = await api.metric("shoal_generated_tokens_total")
    for answer in (await api.complete([253] * (CONTEXT + 1), max_tokens=1, stream=stream),
                   await api.complete(" a" * (CONTEXT + 1), max_tokens=1, stream=stream),
                   await api.chat(messages=await messages_of(api, CONTEXT + 1), stream=stream)):
        message = refusal(answer, [400], "context_length_exceeded")
        assert str(CONTEXT) in message
        assert str(CONTEXT + 1) in message
    over = await api.complete([253] * 1000, max_tokens=25, stream=stream)
    refusal(over, [400], "context_length_exceeded")
    assert await api.metric("shoal_generated_tokens_total") == drawn


async def test_a_prompt_that_leaves_room_for_one_token_is_answered_with_one(api: Api) -> None:
    """B04"""
    whole, chat = await asyncio.gather(
        api.complete([253] * (CONTEXT - 1), max_tokens=1),
        api.chat(messages=await messages_of(api, CONTEXT - 1), max_tokens=1))
    for body in (whole.json(), chat.json()):
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (CONTEXT - 1, 1)
    full = await api.complete([253] * (CONTEXT - 24), max_tokens=24)
    assert full.json()["usage"]["total_tokens"] == CONTEXT


async def test_an_empty_prompt_is_refused_and_an_empty_message_answered(api: Api) -> None:
    """B05"""
    async with api.unharmed():
        empty: tuple[Any, ...] = ("", [""], [], [[]])
        for prompt in empty:
            refusal(await api.complete(prompt, max_tokens=4), [400], param="prompt")
            assert await api.is_alive()
        refusal(await api.chat(messages=[]), [400], param="messages")
        for content in ("", [{"type": "text", "text": ""}], []):
            assert (await api.chat(messages=[{"role": "user", "content": content}])).status_code == 200


async def test_every_shape_of_an_assistants_turn_is_answered_or_refused_by_name(api: Api) -> None:
    """B06"""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user, result = {"role": "user", "content": "q"}, {"role": "tool", "tool_call_id": "call_1", "content": "ok"}
    turns: list[dict[str, Any]] = [
        {"content": None, "tool_calls": [call]}, {"tool_calls": [call]}, {"content": "x", "tool_calls": []},
        {"content": "x", "tool_calls": None}, {"content": None, "tool_calls": None}]
    wrong: list[dict[str, Any]] = [
        {"role": "user", "content": None}, {"role": "user"}]
    async with api.unharmed():
        for turn in turns:
            history = [user, {"role": "assistant", **turn}, *([result] if turn["tool_calls"] else [])]
            assert (await api.chat(messages=history)).status_code == 200, turn
        for turn in wrong:
            refusal(await api.chat(messages=[user, turn]), [400], param="messages.1.content")


async def test_all_text_parts_of_a_message_are_in_the_prompt(api: Api) -> None:
    """B06"""
    messages = [{"role": "user", "content": [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]}]
    assert (await api.chat(messages=messages)).status_code == 200
    ids = await api.tokens(messages=messages)
    prompt = (await api.client.post("/detokenize", json={"tokens": ids})).json()["prompt"]
    assert "alpha" in prompt
    assert "beta" in prompt


def a_schema(**schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize("change", [
    pytest.param({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, id="no wrapper"),
    pytest.param({"response_format": {"type": "xml"}}, id="unknown format"),
    pytest.param({"response_format": "json"}, id="format as text"),
    pytest.param(a_schema(type="strng"), id="unknown type"),
    pytest.param(a_schema(type="object", unevaluatedProperties=False), id="unsupported keyword"),
    pytest.param(a_schema(type="string", pattern="[a-"), id="open bracket in a schema"),
    pytest.param(a_schema(**{"$ref": "#/$defs/none"}), id="reference to nothing"),
    pytest.param({"structured_outputs": {"json": {"type": "strng"}}}, id="unknown type, as in vLLM"),
    pytest.param({"tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "strng"}}}}}], "tool_choice": "required"}, id="tool"),
    pytest.param({"structured_outputs": {"regex": "[a-"}}, id="open bracket"),
    pytest.param({"structured_outputs": {"regex": "("}}, id="open group"),
])
async def test_a_bad_schema_or_pattern_is_refused_by_name_before_any_token(api: Api, change: dict[str, Any]) -> None:
    """B09"""
    field = next(iter(change))
    async with api.unharmed():
        for stream in (False, True):
            answer = await api.chat(**change, stream=stream)
            assert field in refusal(answer, [400])
            assert answer.json()["error"]["param"].split(".")[0] == field


@pytest.mark.parametrize("keyword", [
    {"uniqueItems": True}, {"not": {"type": "null"}}, {"if": {}, "then": {}}, {"contains": {"type": "null"}},
    {"propertyNames": {"pattern": "a"}}, {"dependentRequired": {"a": ["b"]}},
], ids=lambda keyword: next(iter(keyword)))
async def test_a_keyword_that_is_not_enforced_is_refused_by_its_name(api: Api, keyword: dict[str, Any]) -> None:
    """B09"""
    field = "response_format.json_schema.schema"
    message = refusal(await api.chat(**a_schema(**keyword)), [400], param=field)
    assert next(iter(keyword)) in message


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_comes_when_asked_for_and_a_finish_reason_is_null_until_the_last_chunk(
    api: Api, options: dict[str, bool] | None
) -> None:
    """B13"""
    whole = (await api.chat(max_tokens=12)).json()
    chunks = events((await api.chat(max_tokens=12, stream=True, stream_options=options)).text)
    assert chunks.pop() == "[DONE]"
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    if options and options["include_usage"]:
        last = chunks.pop()
        assert (last["choices"], last["usage"]["total_tokens"]) == ([], whole["usage"]["total_tokens"])
        assert all(c["usage"] is None for c in chunks)
    else:
        assert not any(c.get("usage") for c in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_choices_of_a_stream_each_have_one_finish_reason_and_their_usage_is_counted_once(
    api: Api, path: str
) -> None:
    """B13"""
    body = {"model": api.stack.model, "max_tokens": 8, "n": 3, "prompt": "a b c d e f g h i j k l",
            "messages": [{"role": "user", "content": "hi"}]}
    del body["prompt" if "chat" in path else "messages"]
    whole = (await api.client.post(path, json=body)).json()
    *chunks, last, done = events((await api.client.post(
        path, json={**body, "stream": True, "stream_options": {"include_usage": True}})).text)
    assert (done, last["choices"], last["usage"]["completion_tokens"]) == ("[DONE]", [], 24)
    assert last["usage"] == whole["usage"]
    assert {(c["id"], c["created"], c["usage"]) for c in chunks} == {(last["id"], last["created"], None)}
    for index in range(3):
        reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


async def test_stream_options_without_a_stream_are_refused(api: Api) -> None:
    """B13"""
    for stream in (False, None):
        answer = await api.chat(stream=stream, stream_options={"include_usage": True})
        assert "stream: true" in refusal(answer, [400], param="stream_options")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_while_tokens_are_drawn_stops_the_work(api: Api, stream: bool) -> None:
    """B14"""
    before = await api.metric("shoal_generated_tokens_total")
    writer = await api.raw({"prompt": "a b c", **LONG, "stream": stream})
    await api.until("shoal_generated_tokens_total", lambda drawn: drawn > before + 5)
    writer.close()
    await api.comes_to_rest()
    assert await api.metric("shoal_generated_tokens_total") < before + 512
    assert await api.is_alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_during_a_long_prefill_stops_it(api: Api, stream: bool) -> None:
    """B14"""
    await api.comes_to_rest()
    before = await api.metric("shoal_generated_tokens_total")
    writer = await api.raw({"prompt": [253] * 1000, "max_tokens": 20, "stream": stream, "cache_salt": uuid4().hex})
    await api.until("shoal_requests_running", lambda running: running == 1)
    assert await api.metric("shoal_kv_free_blocks") < await api.metric("shoal_kv_blocks")
    writer.close()
    await api.comes_to_rest()
    assert await api.metric("shoal_generated_tokens_total") == before
    assert await api.is_alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_in_the_queue_leaves_it_and_the_others_run_on(api: Api, stream: bool) -> None:
    """B14"""
    running = [await api.raw({"prompt": f"a b {i}", **LONG, "stream": True}) for i in range(MAX_RUNNING)]
    await api.until("shoal_requests_running", lambda value: value == MAX_RUNNING)
    queued = await api.raw({"prompt": "c d", **LONG, "stream": stream})
    await api.until("shoal_requests_waiting", lambda value: value == 1)
    queued.close()
    await api.until("shoal_requests_waiting", lambda value: value == 0, within_s=2)
    assert await api.metric("shoal_requests_running") == MAX_RUNNING
    for writer in running:
        writer.close()
    await api.comes_to_rest()
    assert await api.is_alive()


async def test_requests_of_one_request_id_each_get_their_own_text(api: Api) -> None:
    """B15"""
    same = {"x-request-id": "same"}
    texts = ["alpha " * 12, "beta gamma " * 9, "delta " * 15]
    answers = await asyncio.gather(*(
        api.complete(text, same, max_tokens=100, request_id="same", rid="same") for text in texts))
    assert [text_in(answer, stream=False) for answer in answers] == texts
    assert len({answer.json()["id"] for answer in answers}) == len(texts)
    assert {answer.headers["x-request-id"] for answer in answers} == {"same"}
    twice = await api.complete("alpha", [("x-request-id", "same"), ("x-request-id", "other")], max_tokens=100)
    assert text_in(twice, stream=False) == "alpha"
    assert await api.is_alive()


async def test_cancelling_one_of_two_requests_of_one_id_leaves_the_other_and_frees_the_id(api: Api) -> None:
    """B15"""
    text = "one two three " * 70
    other = asyncio.create_task(api.complete(text, {"x-request-id": "same"}, max_tokens=300, stream=True))
    cancelled = await api.raw({"prompt": "a b c", **LONG, "stream": True}, "X-Request-Id: same\r\n")
    await api.until("shoal_requests_running", lambda running: running == 2)
    cancelled.close()
    again = await api.complete("at once", {"x-request-id": "same"}, max_tokens=100)
    assert not other.done()
    assert text_in(again, stream=False) == "at once"
    assert text_in(await other, stream=True) == text
    await api.comes_to_rest()
    assert await api.is_alive()


async def test_what_is_no_request_has_its_own_status_in_the_envelope(api: Api) -> None:
    """B16"""
    good = json.dumps({"model": api.stack.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    paths = ("/v1/chat/completions", "/v1/completions")

    async def post(path: str, content: str, kind: str | None) -> httpx2.Response:
        headers = {} if kind is None else {"content-type": kind}
        return await api.client.post(path, content=content.encode(), headers=headers)

    async with api.unharmed():
        for path in paths:
            refusal(await post(path, '{"model":"m", x}', "application/json"), [400])
            refusal(await post(path, good, "text/plain"), [415, 400])
            refusal(await post(path, good, None), [415, 400])
            refusal(await api.client.get(path), [405])
        refusal(await api.chat(model="nope"), [404], "model_not_found")
        refusal(await api.complete("a", model="nope", stream=True), [404], "model_not_found")
        refusal(await api.client.get("/v1/nope"), [404])
        assert (await api.chat(zzz=1)).status_code == 200
        assert (await api.complete("a", zzz=1)).status_code == 200
