"""Choices, batches, logprobs, echo and tool calls over real HTTP in front of fakes, as the clients ask for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from common.errors import WorkerLost
from common.generation import Generation
from common.tokenized import ModelText
from gateway.answer_schemas import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from tests.fakes import EOS, MODEL, VOCAB_SIZE, FakeDecode, FakeTokenizer, Step, fake_logprobs, says
from tests.http_gateway import M0, HttpGateway, events, http_gateway, until

WORDS = ("alpha 🙂", "beta", "gamma is long")
HERMES = '{{ "<tool_call>" }}'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
         for name in ("add", "weather")]


def each_says(texts: tuple[str, ...]) -> Any:
    def script(_worker: str, generation: Generation) -> list[Step]:
        return [[byte] for byte in texts[generation.choice % len(texts)].encode()]

    return script


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway(FakeDecode(each_says(WORDS))) as running:
        yield running


def by_choice(chunks: list[Any], field: str) -> dict[int, str]:
    """The joined text of each choice; every choice ends once, and nothing comes after its end."""
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            text = choice["text"] if field == "text" else choice["delta"].get(field) or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            if choice["finish_reason"]:
                ended.add(choice["index"])
    assert ended == texts.keys()
    return texts


def sealed(model: Any, body: Any) -> None:
    """The answer is what the document says, and has no field beyond that."""
    made = model.model_validate(body, strict=False)
    known = made.model_dump(exclude_unset=True)
    assert known == body


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_choices_are_the_same_streamed_and_whole_and_usage_counts_them_all(
    gateway: HttpGateway, endpoint: str
) -> None:
    ask, field = getattr(gateway, endpoint), "text" if endpoint == "complete" else "content"
    whole = (await ask(n=3, max_tokens=50)).json()
    answer = await ask(n=3, max_tokens=50, stream=True, stream_options={"include_usage": True})
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    texts = [c["text"] if field == "text" else c["message"]["content"] for c in whole["choices"]]
    assert texts == list(WORDS)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert list(dict(sorted(by_choice(chunks, field).items())).values()) == texts
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(word.encode()) + 1 for word in WORDS)
    roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c.get("delta", {}).get("role")]
    assert sorted(roles) == ([0, 1, 2] if endpoint == "chat" else [])
    sealed(ChatCompletion if endpoint == "chat" else Completion, whole)
    for chunk in chunks:
        sealed(ChatCompletionChunk if endpoint == "chat" else CompletionChunk, chunk)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_of_prompts_answers_n_of_the_first_then_n_of_the_second(stream: bool) -> None:
    def script(_worker: str, generation: Generation) -> list[Step]:
        return [[token, 48 + generation.choice] for token in generation.prompt_token_ids]

    async with http_gateway(FakeDecode(script), prompts_at_once=2) as gateway:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await gateway.complete(["ab", "c", "defg"], n=2, max_tokens=50, **options)
        if stream:
            chunks = events(answer.text)[:-1]
            texts, usage = by_choice(chunks, "text"), chunks[-1]["usage"]
            assert len({chunk["id"] for chunk in chunks}) == 1
        else:
            texts, usage = {c["index"]: c["text"] for c in answer.json()["choices"]}, answer.json()["usage"]
        assert [texts[i] for i in range(6)] == ["a0b0", "a1b1", "c0", "c1", "d0e0f0g0", "d1e1f1g1"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 2 * (4 + 2 + 8) + 6)


async def test_one_bad_prompt_of_a_batch_is_one_error_and_nothing_runs_on(gateway: HttpGateway) -> None:
    gateway.decode.script = lambda _w, _g: [b"a", asyncio.Event()]
    answer = await gateway.complete(["fine", "x" * 600])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    await until(lambda: gateway.admission.num_running == 0, "the slot is free")
    assert gateway.decode.aborted == {g.request_id for g in gateway.decode.generations}


async def test_a_worker_lost_under_one_of_several_choices_without_another_is_one_error_event(
    gateway: HttpGateway
) -> None:
    gateway.decode.script = lambda _w, g: [b"ab", b"cd", *([WorkerLost("gone")] if g.choice else [])]
    answer = await gateway.chat(n=2, max_tokens=50, stream=True)
    chunks = events(answer.text)
    assert [c for c in chunks if c != "[DONE]" and "error" in c] == [chunks[-1]]
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert (await gateway.chat(n=2, max_tokens=50)).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_stops_all_choices_of_all_prompts(stream: bool) -> None:
    decode = FakeDecode(lambda _w, _g: [b"ab", asyncio.Event()])
    async with http_gateway(decode) as gateway:
        _reader, writer = await gateway.raw("/v1/completions", {
            "model": MODEL, "prompt": ["a", "b"], "n": 2, "stream": stream, "max_tokens": 9})
        await until(lambda: decode.num_tokens_sent == 8, "both prompts have begun")
        writer.close()
        await writer.wait_closed()
        await until(lambda: gateway.admission.num_running == 0, "the slot is free")
        assert decode.aborted == {g.request_id for g in decode.generations}
        assert len(decode.aborted) == 2


@pytest.mark.parametrize("top", [None, 0, 3, 20])
async def test_logprobs_of_a_chat_have_one_entry_a_token_and_as_many_alternatives_as_asked(
    gateway: HttpGateway, top: int | None
) -> None:
    options: dict[str, Any] = {"logprobs": True, "max_tokens": 50} | ({} if top is None else {"top_logprobs": top})
    body = (await gateway.chat(**options)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert [bytes(e["bytes"]) for e in content] == [*(bytes([b]) for b in WORDS[0].encode()), b"<eos>"]
    assert {len(e["top_logprobs"]) for e in content} == {top or 0}
    chunks = events((await gateway.chat(**options, stream=True)).text)[:-1]
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content
    sealed(ChatCompletion, body)
    for chunk in chunks:
        sealed(ChatCompletionChunk, chunk)


async def test_a_stop_string_takes_its_tokens_along_and_leaves_none_behind_it(gateway: HttpGateway) -> None:
    gateway.decode.script = says("ABCDEFGHIJ", per_step=4)
    for stream in (False, True):
        answer = await gateway.complete(stop="DEF", logprobs=0, stream=stream, max_tokens=50)
        found = [c["choices"][0]["logprobs"] for c in events(answer.text)[:-1]] if stream else [
            answer.json()["choices"][0]["logprobs"]]
        assert [t for part in found if part for t in part["tokens"]] == list("ABCDEF")


async def test_lm_eval_gets_the_logprobs_of_its_prompt_and_one_token_more(gateway: HttpGateway) -> None:
    ids = [list(b"the fox"), list(b"a hen")]
    body = (await gateway.complete(ids, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)).json()
    for choice, prompt in zip(body["choices"], ids, strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"] == bytes(prompt).decode() + "a"
        assert logprobs["tokens"] == [*bytes(prompt).decode(), "a"]
        assert logprobs["token_logprobs"] == [None, *(fake_logprobs(i, 1).logprob for i in [*prompt[1:], 97])]
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
        assert logprobs["text_offset"] == list(range(len(prompt) + 1))
    assert body["usage"]["completion_tokens"] == 2
    sealed(Completion, body)


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_asked_with_echo_answers_the_prompt_with_its_logprobs(
    gateway: HttpGateway, stream: bool
) -> None:
    answer = await gateway.complete("A B C", max_tokens=0, echo=True, logprobs=1, stream=stream)
    assert answer.status_code == 200
    chunks = events(answer.text)[:-1] if stream else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(c["text"] for c in choices) == "A B C"
    assert [v for c in choices if c["logprobs"] for v in c["logprobs"]["token_logprobs"]] == [
        None, *(fake_logprobs(i, 1).logprob for i in b" B C")]
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert answer.json()["usage"]["completion_tokens"] == 0
    assert await gateway.alive()


async def test_prompt_logprobs_come_in_the_shape_of_vllm(gateway: HttpGateway) -> None:
    chat = (await gateway.chat(prompt_logprobs=1)).json()
    assert [None if p is None else set(p) for p in chat["prompt_logprobs"]] == [
        None, *({str(i), str(i - 1)} for i in b"ser:hi")]
    completion = (await gateway.complete("hi", prompt_logprobs=0)).json()
    assert completion["choices"][0]["prompt_logprobs"] == [
        None, {"105": {"logprob": fake_logprobs(105, 0).logprob, "rank": None, "decoded_token": "i"}}]
    sealed(ChatCompletion, chat)
    sealed(Completion, completion)


async def test_texts_of_tokens_are_asked_for_once(gateway: HttpGateway) -> None:
    for _ in range(3):
        await gateway.chat(logprobs=True, max_tokens=50, stream=True)
    assert gateway.tokenizer.num_texts_asked == len({*WORDS[0].encode(), EOS})


class Described(FakeTokenizer):
    async def describe(self, model: str) -> ModelText:
        return ModelText(model, VOCAB_SIZE, (EOS,), None, HERMES)


CALLS = ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>\n'
         '<tool_call>\n{"name": "weather", "arguments": {"city": "Tokyo"}}\n</tool_call>')


@pytest.mark.parametrize("per_step", [1, 7, 1000])
async def test_parallel_tool_calls_have_their_own_index_id_and_name_in_stream_and_body(per_step: int) -> None:
    decode = FakeDecode(says(CALLS, per_step=per_step))
    async with http_gateway(decode, Described()) as gateway:
        whole = (await gateway.chat(tools=TOOLS, max_tokens=400)).json()
        chunks = events((await gateway.chat(tools=TOOLS, max_tokens=400, stream=True)).text)[:-1]
    message = whole["choices"][0]["message"]
    assert (message["content"], whole["choices"][0]["finish_reason"]) == (None, "tool_calls")
    deltas = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
    firsts = [part for part in deltas if "id" in part]
    assert [(part["index"], part["function"]["name"]) for part in firsts] == [(0, "add"), (1, "weather")]
    assert len({part["id"] for part in firsts}) == 2
    for index, call in enumerate(message["tool_calls"]):
        arguments = "".join(p["function"]["arguments"] for p in deltas if p["index"] == index)
        assert json.loads(arguments) == json.loads(call["function"]["arguments"])
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["tool_calls"]
    sealed(ChatCompletion, whole)
    for chunk in chunks:
        sealed(ChatCompletionChunk, chunk)


@pytest.mark.parametrize(("setting", "names"), [
    ("both", {"reasoning", "reasoning_content"}), ("reasoning", {"reasoning"}),
    ("reasoning_content", {"reasoning_content"})])
async def test_reasoning_goes_to_the_configured_fields_and_is_counted(setting: str, names: set[str]) -> None:
    decode = FakeDecode(says("<think>hm so</think>yes"))
    async with http_gateway(decode, reasoning_parser="qwen3", reasoning_field=setting) as gateway:
        body = (await gateway.chat(max_tokens=400)).json()
        chunks = events((await gateway.chat(max_tokens=400, stream=True)).text)[:-1]
    message = body["choices"][0]["message"]
    assert message["content"] == "yes"
    assert {name: message[name] for name in message if "reasoning" in name} == dict.fromkeys(names, "hm so")
    for name in names:
        assert "".join(c["choices"][0]["delta"].get(name, "") for c in chunks) == "hm so"
    assert 5 <= body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= len("<think>hm so</think>")


async def test_requests_of_one_session_have_one_affinity_key() -> None:
    seen: list[str] = []

    class Router:
        async def route(self, query: Any) -> Any:
            seen.append(query.affinity_key)
            raise WorkerLost("never")

        async def publish(self, outcome: Any) -> None:
            """To nobody."""

    async with http_gateway(router=Router()) as gateway:
        await gateway.chat({"x-session-affinity": "s1"})
        await gateway.chat({"x-session-id": "s2"})
        await gateway.chat({"x-session-id": "s" * 1000})
        await gateway.chat({"x-session-id": "s2"}, prompt_cache_key="k")
    assert seen == ["s1", "s2", "", "k"]


async def test_the_openai_client_reads_choices_logprobs_and_tool_calls(gateway: HttpGateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        messages: Any = M0["messages"]
        chat = await client.chat.completions.create(
            model=MODEL, messages=messages, n=2, logprobs=True, top_logprobs=2, max_tokens=50)
        assert [c.message.content for c in chat.choices] == list(WORDS[:2])
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content[0].top_logprobs) == 2
        texts = {0: "", 1: ""}
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=messages, n=2, stream=True, max_tokens=50):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert list(texts.values()) == list(WORDS[:2])
        done = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True, max_tokens=3)
        assert [c.text for c in done.choices] == ["aalp", "balp"]
        assert done.choices[0].logprobs is not None
        assert done.choices[0].logprobs.text_offset == [0, 1, 2, 3]
