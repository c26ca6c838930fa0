"""The gateway over real HTTP in front of fakes: answers, refusals, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from common.errors import InvalidRequest, Overloaded, Unavailable, WorkerLost
from common.generation import WorkerView
from common.grammar import Grammar, GrammarKind
from tests.fakes import FINGERPRINT, MODEL, FakeDecode, says
from tests.http_gateway import M0, HttpGateway, http_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway() as running:
        yield running


def refusal(answer: httpx2.Response, status: int, code: str, param: str | None = None) -> str:
    """The message of an error, whose envelope, status, code and param are as expected."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param), body
    message: str = body["error"]["message"]
    assert len(message) <= 1000
    return message


async def test_a_chat_is_answered_with_text_finish_and_usage(gateway: HttpGateway) -> None:
    answer = await gateway.chat(max_tokens=50, messages=[{"role": "user", "content": "x" * 40}])
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 45, "completion_tokens": 6, "total_tokens": 51,
                             "prompt_tokens_details": {"cached_tokens": 32},
                             "completion_tokens_details": {"reasoning_tokens": 0}}
    assert body["metrics"]["time_to_first_token_ms"] > 0
    assert body["system_fingerprint"].startswith("shoal-")


async def test_a_completion_has_its_own_shape_and_sixteen_tokens_by_default(gateway: HttpGateway) -> None:
    gateway.decode.script = says("abcdefghijklmnopqrstuvwxyz")
    body = (await gateway.complete()).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"][0]["text"] == "abcdefghijklmnop"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["ABC", ["ABC"], [65, 66, 67], [[65, 66, 67]]])
async def test_every_form_of_one_prompt_means_the_same_tokens(gateway: HttpGateway, prompt: Any) -> None:
    assert (await gateway.complete(prompt)).status_code == 200
    assert gateway.decode.generations[-1].prompt_token_ids == (65, 66, 67)


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
async def test_a_prompt_without_content_is_refused(gateway: HttpGateway, prompt: Any) -> None:
    refusal(await gateway.complete(prompt), 400, "invalid_value", "prompt")
    assert await gateway.alive()


async def test_the_defaults_of_a_chat_leave_no_room_unused_up_to_the_cap(gateway: HttpGateway) -> None:
    await gateway.chat(max_tokens=None)
    assert gateway.decode.generations[-1].params.max_tokens == 512 - len("user:hi")
    async with http_gateway(default_max_tokens=7) as capped:
        await capped.chat(max_tokens=None)
        assert capped.decode.generations[-1].params.max_tokens == 7


async def test_max_completion_tokens_wins_and_is_named_in_errors(gateway: HttpGateway) -> None:
    await gateway.chat(max_tokens=4, max_completion_tokens=2)
    assert gateway.decode.generations[-1].params.max_tokens == 2
    refusal(await gateway.chat(max_completion_tokens=0), 400, "invalid_value", "max_completion_tokens")


@pytest.mark.parametrize("max_tokens", [0, -1])
async def test_max_tokens_below_one_is_refused_and_nothing_breaks(gateway: HttpGateway, max_tokens: int) -> None:
    refusal(await gateway.chat(max_tokens=max_tokens), 400, "invalid_value", "max_tokens")
    refusal(await gateway.complete(max_tokens=max_tokens), 400, "invalid_value", "max_tokens")
    refusal(await gateway.complete(max_tokens=-1, echo=True), 400, "invalid_value", "max_tokens")
    assert (await gateway.chat(max_tokens=1)).json()["usage"]["completion_tokens"] == 1
    assert await gateway.alive()


async def test_an_echo_without_output_is_the_prompt_and_its_logprobs(gateway: HttpGateway) -> None:
    body = (await gateway.complete(max_tokens=0, echo=True, logprobs=1)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "A B C"
    assert len(choice["logprobs"]["token_logprobs"]) == body["usage"]["prompt_tokens"] == 5
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_beyond_the_context_names_both_numbers(gateway: HttpGateway, stream: bool) -> None:
    answer = await gateway.complete("x" * 513, stream=stream)
    message = refusal(answer, 400, "context_length_exceeded", "prompt")
    assert "512" in message
    assert "513" in message
    long = [{"role": "user", "content": "x" * 600}]
    refusal(await gateway.chat(messages=long, stream=stream), 400, "context_length_exceeded", "messages")
    refusal(await gateway.chat(messages=long, max_tokens=None), 400, "context_length_exceeded", "messages")
    assert gateway.decode.generations == []


async def test_prompt_and_output_together_must_fit_the_context(gateway: HttpGateway) -> None:
    assert (await gateway.complete("x" * 511, max_tokens=1)).status_code == 200
    refusal(await gateway.complete("x" * 500, max_tokens=13), 400, "context_length_exceeded", "prompt")


@pytest.mark.parametrize(("change", "code", "param"), [
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": "hi"}, "invalid_value", "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "invalid_value", "messages.0.content"),
    ({"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages.0.content"),
    ({"messages": [{"role": "king", "content": "x"}]}, "invalid_value", "messages.0.role"),
    ({"temperature": "warm"}, "invalid_value", "temperature"),
    ({"temperature": 2.1}, "invalid_value", "temperature"),
    ({"temperature": True}, "invalid_value", "temperature"),
    ({"top_p": 0}, "invalid_value", "top_p"),
    ({"top_k": -2}, "invalid_value", "top_k"),
    ({"seed": 2**64}, "invalid_value", "seed"),
    ({"seed": 1.5}, "invalid_value", "seed"),
    ({"max_tokens": "many"}, "invalid_value", "max_tokens"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": ["x"] * 17}, "invalid_value", "stop"),
    ({"stop": ["y" * 257]}, "invalid_value", "stop"),
    ({"logit_bias": {"999999": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"abc": 5}}, "invalid_value", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"stop_token_ids": [999999]}, "invalid_value", "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"chat_template": "{{ 1 }}"}, "invalid_value", "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "invalid_value", "chat_template_kwargs.chat_template"),
    ({"n": 65}, "invalid_value", "n"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"top_logprobs": 5}, "invalid_value", "top_logprobs"),
    ({"presence_penalty": 2.5}, "invalid_value", "presence_penalty"),
    ({"allowed_token_ids": [999999]}, "invalid_value", "allowed_token_ids"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "object"}}}, "invalid_value",
     "response_format.json_schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {}}}, "unsupported_value", "structured_outputs.structural_tag"),
    ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}],
      "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "invalid_value", "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
     "unsupported_value", "messages.0.content.0.type"),
])
async def test_a_wrong_value_is_a_400_that_names_its_field(
    gateway: HttpGateway, change: dict[str, Any], code: str, param: str
) -> None:
    for stream in ({}, {"stream": True}) if "stream_options" not in change else ({},):
        refusal(await gateway.chat(**change, **stream), 400, code, param)
    assert gateway.decode.generations == []


@pytest.mark.parametrize(("change", "param"), [
    ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs.regex"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strng"}}}},
     "response_format.json_schema.schema"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}],
      "tool_choice": "required"}, "tools")])
async def test_a_grammar_that_a_worker_refuses_is_a_400_that_names_the_clients_field(
    gateway: HttpGateway, change: dict[str, Any], param: str
) -> None:
    gateway.decode.script = lambda _worker, _generation: [InvalidRequest("grammar: cannot be read", param="grammar")]
    for stream in (False, True):
        message = refusal(await gateway.chat(**change, stream=stream), 400, "invalid_value", param)
        assert message == f"{param}: cannot be read"
    assert len(gateway.decode.generations) == 2  # no other worker is asked
    gateway.decode.script = says("hello")
    assert await gateway.alive()


async def test_what_was_asked_of_tokens_reaches_the_worker(gateway: HttpGateway) -> None:
    await gateway.chat(
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, min_p=0.1, min_tokens=2, top_k=7,
        logprobs=True, top_logprobs=3, allowed_token_ids=[104, 105], bad_words=["no"], regex="hi+", priority=-3)
    generation = gateway.decode.generations[-1]
    params = generation.params
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.min_p, params.min_tokens, params.top_k, params.logprobs) == (0.1, 2, 7, 3)
    assert params.allowed_token_ids == (104, 105)
    assert tuple(b"no") in params.bad_words
    assert params.grammar == Grammar(GrammarKind.REGEX, "hi+")
    assert generation.priority == -3


async def test_values_that_ask_for_nothing_and_unknown_fields_are_accepted(gateway: HttpGateway) -> None:
    answer = await gateway.chat(
        n=1, presence_penalty=0, frequency_penalty=0.0, logprobs=False, top_logprobs=None, tool_choice="none",
        tools=[{"type": "function", "function": {"name": "f"}}], response_format={"type": "text"}, user="u", zzz=1,
        stop=None, seed=None, stream=None, stream_options=None, metadata={"a": "b"}, logit_bias=None, tools_=None)
    assert answer.status_code == 200


async def test_a_seed_is_kept_and_one_is_drawn_when_none_is_given(gateway: HttpGateway) -> None:
    for seed in (7, -1, None, None):
        await gateway.chat(seed=seed)
    seeds = [g.params.seed for g in gateway.decode.generations]
    assert seeds[:2] == [7, 2**64 - 1]
    assert seeds[2] != seeds[3]


async def test_a_body_that_is_not_json_is_a_400_that_names_the_place(gateway: HttpGateway) -> None:
    async def post(content: bytes, kind: str | None = "application/json") -> httpx2.Response:
        headers = {} if kind is None else {"content-type": kind}
        return await gateway.client.post("/v1/chat/completions", content=content, headers=headers)

    assert "column 15" in refusal(await post(b'{"model":"m", x}'), 400, "invalid_value")
    for content in (b"", b"\xff\xfe", b'{"model": "\xe9"}', b"[" * 5000, b'"\\ud800"', b"[]", b"null"):
        refusal(await post(content), 400, "invalid_value")
    good = json.dumps(M0).encode()
    refusal(await post(good, "text/plain"), 415, "unsupported_media_type")
    refusal(await post(good, None), 415, "unsupported_media_type")
    assert (await post(good, "application/json; charset=utf-8")).status_code == 200


async def test_an_error_never_echoes_the_input(gateway: HttpGateway) -> None:
    answer = await gateway.chat(messages=[{"role": "user", "content": {"secret": "hunter2" * 1000}}])
    assert "hunter2" not in answer.text
    assert "hunter2" not in (await gateway.chat(model="hunter2")).text


async def test_a_body_beyond_the_limit_is_a_413_declared_or_not() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1000

    async with http_gateway(max_body_bytes=5000) as gateway:
        refusal(await gateway.chat(user="x" * 6000), 413, "payload_too_large")
        answer = await gateway.client.post(
            "/v1/chat/completions", content=chunks(), headers={"content-type": "application/json"})
        refusal(answer, 413, "payload_too_large")
        assert await gateway.alive()


async def test_unknown_models_paths_and_verbs_have_their_own_statuses(gateway: HttpGateway) -> None:
    refusal(await gateway.chat(model="nope"), 404, "model_not_found", "model")
    refusal(await gateway.client.get("/v1/models/nope"), 404, "model_not_found", "model")
    refusal(await gateway.client.get("/v1/nope"), 404, "not_found")
    refusal(await gateway.client.get("/v1/models/"), 404, "model_not_found", "model")
    answer = await gateway.client.get("/v1/chat/completions")
    refusal(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


async def test_assistant_turns_without_text_reach_the_template(gateway: HttpGateway) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]
    assert (await gateway.chat(messages=history)).status_code == 200
    turn = gateway.tokenizer.prompts[-1].messages[1]
    assert turn["content"] == ""
    assert turn["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    history[1] = {"role": "assistant", "content": "x", "tool_calls": []}
    assert (await gateway.chat(messages=history)).status_code == 200
    history[1] = {"role": "assistant", "content": None}
    assert (await gateway.chat(messages=history)).status_code == 200
    assert gateway.tokenizer.prompts[-1].messages[1] == {"role": "assistant", "content": ""}
    history[0] = {"role": "user", "content": None}
    refusal(await gateway.chat(messages=history), 400, "invalid_value", "messages.0.content")


async def test_token_ids_beyond_the_context_are_refused_before_a_tokenizer_sees_them(gateway: HttpGateway) -> None:
    outside = [10**6] * 600  # the vocabulary too
    refusal(await gateway.complete(outside), 400, "context_length_exceeded", "prompt")
    assert gateway.tokenizer.num_id_prompts == 0
    refusal(await gateway.complete(outside, truncate_prompt_tokens=5), 400, "invalid_value", "prompt")


async def test_text_parts_are_joined_and_an_empty_text_is_a_message(gateway: HttpGateway) -> None:
    parts = [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]
    await gateway.chat(messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts}])
    assert [dict(m) for m in gateway.tokenizer.prompts[-1].messages] == [
        {"role": "system", "content": "d"}, {"role": "user", "content": "alpha\nbeta"}]
    assert (await gateway.chat(messages=[{"role": "user", "content": ""}])).status_code == 200


async def test_models_are_listed_and_found_by_ids_with_slashes(gateway: HttpGateway) -> None:
    listed = (await gateway.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0] == (await gateway.client.get(f"/v1/models/{MODEL}")).json()
    assert listed["data"][0]["max_model_len"] == 512
    assert (await gateway.chat(model=None)).json()["model"] == MODEL  # the only one there is


async def test_tokenize_and_detokenize_speak_both_dialects(gateway: HttpGateway) -> None:
    body = (await gateway.client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert body == {"count": 3, "max_model_len": 512, "tokens": list("hé".encode()), "token_strs": ["h", "Ã", "©"]}
    body = (await gateway.client.post("/tokenize", json={"model": MODEL, "messages": M0["messages"]})).json()
    assert bytes(body["tokens"]) == b"user:hi"
    body = (await gateway.client.post("/detokenize", json={"tokens": [104, 105]})).json()
    assert body == {"prompt": "hi", "text": "hi"}
    refusal(await gateway.client.post("/tokenize", json={}), 400, "invalid_value", "prompt")
    refusal(await gateway.client.post("/detokenize", json={"tokens": [-1]}), 400, "invalid_value", "tokens.0")


async def test_a_worker_that_cannot_is_replaced_by_one_that_can() -> None:
    def script(worker: str, _generation: Any) -> list[Any]:
        return {"w0": [Unavailable("gone")], "w1": [Overloaded("full", retry_after_s=3)],
                "w2": [WorkerLost("died")], "w3": [b"ok"]}[worker]

    workers = [WorkerView(f"w{i}", MODEL, FINGERPRINT, 512, 8) for i in range(4)]
    async with http_gateway(FakeDecode(script=script, workers_=workers), max_placements=4) as gateway:
        assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == "ok"
        assert gateway.decode.placed == ["w0", "w1", "w2", "w3"]
        assert len({g.params.seed for g in gateway.decode.generations}) == 1
    async with http_gateway(FakeDecode(script=script, workers_=workers), max_placements=2) as gateway:
        answer = await gateway.chat(stream=True)
        refusal(answer, 503, "server_is_overloaded")
        assert answer.headers["retry-after"] == "3"
        assert answer.headers["retry-after-ms"] == "3000"


async def test_without_a_worker_the_answer_is_503_with_retry_after() -> None:
    async with http_gateway(FakeDecode(workers_=[])) as gateway:
        answer = await gateway.chat()
        refusal(answer, 503, "service_unavailable")
        assert int(answer.headers["retry-after"]) >= 1
        assert (await gateway.client.get("/ready")).status_code == 503
        assert (await gateway.client.get("/health")).status_code == 200


async def test_ready_reports_each_dependency(gateway: HttpGateway) -> None:
    report = (await gateway.client.get("/ready?verbose")).json()
    assert report["status"] == "ready"
    assert report["models"] == {MODEL: {"num_tokenizers": 1, "num_decode_workers": 1}}
    gateway.admission.start_drain()
    answer = await gateway.client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"status": "draining"})
    refusal(await gateway.chat(), 503, "service_unavailable")


async def test_probes_answer_get_and_head(gateway: HttpGateway) -> None:
    for path in ("/health", "/live", "/ping", "/ready", "/metrics", "/version"):
        for method in ("GET", "HEAD"):
            assert (await gateway.client.request(method, path)).status_code == 200, (method, path)
    openmetrics = await gateway.client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert (await gateway.client.get("/version")).json() == {"version": "1.2.3"}


async def test_client_chosen_strings_do_not_become_series(gateway: HttpGateway) -> None:
    async def num_series() -> int:
        text = (await gateway.client.get("/metrics")).text
        return sum(not line.startswith("#") for line in text.splitlines())

    await gateway.chat()
    before = await num_series()
    for i in range(100):
        await gateway.chat(model=f"m{i}", user=f"u{i}", headers={"x-request-id": f"r{i}"}, **{f"field{i}": 1})
        await gateway.client.get(f"/path{i}")
        await gateway.client.get(f"/v1/models/m{i}")
    assert await num_series() - before <= 20


async def test_the_callers_request_id_comes_back_and_is_never_ours(gateway: HttpGateway) -> None:
    first, second = [await gateway.chat(headers={"x-request-id": "same"}) for _ in range(2)]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    assert first.json()["id"] != second.json()["id"]
    ids = [g.request_id for g in gateway.decode.generations]
    assert "same" not in ids
    assert len(set(ids)) == 2
    assert (await gateway.chat(headers={"x-request-id": "a b" * 100})).headers["x-request-id"] != "a b" * 100


async def test_a_fault_of_ours_is_a_plain_500(gateway: HttpGateway) -> None:
    def broken(_worker: str, _generation: Any) -> list[Any]:
        raise RuntimeError("inner secret")

    gateway.decode.script = broken
    assert "secret" not in refusal(await gateway.chat(), 500, "internal_error")


async def test_a_client_with_less_patience_sets_the_deadline(gateway: HttpGateway) -> None:
    gateway.decode.script = lambda _w, _g: [asyncio.Event()]
    for stream in (False, True):
        answer = await gateway.chat(stream=stream, headers={"x-stainless-read-timeout": "0.2"})
        assert "0.2 s" in refusal(answer, 504, "deadline_exceeded")
    assert len(gateway.decode.aborted) == 2
