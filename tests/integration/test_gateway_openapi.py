"""The OpenAPI document against real answers: every status, media type and body is as it says."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from pydantic import BaseModel

from common.errors import Unavailable
from common.tokenized import ModelText
from gateway import answer_schemas, utility_schemas
from tests.fakes import MODEL, FakeTokenizer
from tests.http_gateway import HttpGateway, events, http_gateway


@pytest.fixture
async def gateway() -> AsyncIterator[HttpGateway]:
    async with http_gateway() as running:
        yield running


class NoTokenizer(FakeTokenizer):
    """As its client is when no replica is there."""

    async def describe(self, model: str) -> ModelText:
        raise Unavailable(f"no tokenizer of model {model!r}", retry_after_s=1.0)


async def document_of(gateway: HttpGateway) -> dict[str, Any]:
    document: dict[str, Any] = (await gateway.client.get("/openapi.json")).json()
    return document


def hold_to(document: dict[str, Any], path: str, answer: httpx2.Response) -> None:
    """Its status, media type and body are declared for this operation."""
    declared = document["paths"][path][answer.request.method.lower()]["responses"]
    assert str(answer.status_code) in declared, (path, answer.status_code, answer.text)
    content = declared[str(answer.status_code)].get("content", {})
    media_type = answer.headers.get("content-type", "").partition(";")[0]
    if not content:
        assert answer.content == b""
        return
    assert media_type in content, (path, media_type)
    if media_type == "application/json":
        jsonschema.validate(answer.json(), {**content[media_type]["schema"], "components": document["components"]})


def hold_fields_to(model: type[BaseModel], body: Any) -> None:
    """There is no field that the model does not know."""
    model.model_validate(body, strict=True, extra="forbid")


async def test_whole_answers_are_as_documented(gateway: HttpGateway) -> None:
    document = await document_of(gateway)
    for changes in ({}, {"return_token_ids": True}, {"stop": "l"}, {"n": 2}):
        answer = await gateway.chat(**changes)
        assert answer.status_code == 200
        hold_to(document, "/v1/chat/completions", answer)
        hold_fields_to(answer_schemas.ChatCompletion, answer.json())
        answer = await gateway.complete(**changes)
        assert answer.status_code == 200
        hold_to(document, "/v1/completions", answer)
        hold_fields_to(answer_schemas.Completion, answer.json())


async def test_streamed_answers_are_as_documented(gateway: HttpGateway) -> None:
    document = await document_of(gateway)
    for options in (None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
        changes = {"stream": True, "stream_options": options, "return_token_ids": bool(options)}
        answer = await gateway.chat(**changes)
        hold_to(document, "/v1/chat/completions", answer)
        assert len(events(answer.text)) > 2
        for chunk in events(answer.text)[:-1]:
            hold_fields_to(answer_schemas.ChatCompletionChunk, chunk)
        answer = await gateway.complete(**changes)
        hold_to(document, "/v1/completions", answer)
        assert len(events(answer.text)) > 2
        for chunk in events(answer.text)[:-1]:
            hold_fields_to(answer_schemas.CompletionChunk, chunk)


async def test_every_get_is_as_documented(gateway: HttpGateway) -> None:
    document = await document_of(gateway)
    models = {"/v1/models": utility_schemas.ModelList, "/v1/models/{model_id}": utility_schemas.Model,
              "/load": utility_schemas.Load, "/server_info": utility_schemas.ServerInfo,
              "/model_info": utility_schemas.ModelInfo, "/tokenizer_info": utility_schemas.TokenizerInfo,
              "/version": utility_schemas.Version, "/ready": utility_schemas.Readiness}
    gets = {path for path, operations in document["paths"].items() if "get" in operations}
    assert gets == {*models, "/health", "/live", "/ping", "/metrics"}
    for path in sorted(gets):
        answer = await gateway.client.get(path.replace("{model_id}", "org/tiny"))
        assert answer.status_code == 200, path
        hold_to(document, path, answer)
        if path in models:
            hold_fields_to(models[path], answer.json())
        if not path.startswith("/v1/"):
            assert (await gateway.client.head(path)).status_code == 200, path
    hold_to(document, "/ready", await gateway.client.get("/ready?verbose"))
    hold_to(document, "/metrics", await gateway.client.get(
        "/metrics", headers={"accept": "application/openmetrics-text"}))


async def test_token_endpoints_are_as_documented(gateway: HttpGateway) -> None:
    document = await document_of(gateway)
    for strings in (False, True):
        answer = await gateway.client.post("/tokenize", json={"prompt": "ab", "return_token_strs": strings})
        assert answer.json()["tokens"] == [97, 98]
        hold_to(document, "/tokenize", answer)
        hold_fields_to(utility_schemas.Tokens, answer.json())
    answer = await gateway.client.post("/detokenize", json={"tokens": [65]})
    assert answer.json()["text"] == "A"
    hold_to(document, "/detokenize", answer)
    hold_fields_to(utility_schemas.Text, answer.json())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_every_refusal_of_a_body_is_declared(path: str) -> None:
    async with http_gateway(api_keys="right-key", max_body_bytes=2000, body_timeout_s=0.2) as gateway:
        gateway.client.headers["authorization"] = "Bearer right-key"
        document = await document_of(gateway)
        body = {"model": "no-such", "messages": [{"role": "user", "content": "a"}], "prompt": "a", "tokens": [65]}
        if path == "/tokenize":
            del body["messages"]
        seen = [
            await gateway.client.post(path, json={}), await gateway.client.post(path, json=body),
            await gateway.client.post(path, content=b"{}", headers={"content-type": "text/plain"}),
            await gateway.client.post(path, json={"prompt": "x" * 3000}),
            await gateway.client.post(path, json=body, headers={"authorization": "Bearer wrong-key"}),
            await gateway.client.post(path, content=never_ends(), headers={"content-type": "application/json"})]
        gateway.admission.start_drain()
        seen.append(await gateway.client.post(path, json=body))
        assert [answer.status_code for answer in seen] == [400, 404, 415, 413, 401, 504, 503]
        for answer in seen:
            hold_to(document, path, answer)
            hold_fields_to(utility_schemas.Error, answer.json())


async def never_ends() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.sleep(5)


@pytest.mark.parametrize("path", ["/model_info", "/tokenizer_info"])
async def test_a_model_is_named_or_the_only_one(path: str) -> None:
    async with http_gateway() as gateway:
        document = await document_of(gateway)
        assert (await gateway.client.get(path)).json() == (await gateway.client.get(f"{path}?model=org/tiny")).json()
        unknown = await gateway.client.get(f"{path}?model=nope")
        gateway.decode.names = ("one", "two")
        unnamed = await gateway.client.get(path)
    async with http_gateway(tokenizer=NoTokenizer()) as gateway:
        away = await gateway.client.get(path)
    assert [answer.status_code for answer in (unknown, unnamed, away)] == [404, 400, 503]
    for answer in (unknown, unnamed, away):
        hold_to(document, path, answer)


async def test_a_model_without_a_worker_keeps_what_its_tokenizer_knows(gateway: HttpGateway) -> None:
    gateway.decode.workers_ = []
    body = (await gateway.client.get("/model_info")).json()
    assert (body["num_workers"], body["dtype"], body["block_size"], body["vocab_size"]) == (0, None, None, 257)


async def test_load_counts_requests_in_work_and_tells_of_each_worker(gateway: HttpGateway) -> None:
    hold = asyncio.Event()
    gateway.decode.script = lambda _worker, _generation: [hold]
    running = asyncio.create_task(gateway.chat())
    while not gateway.decode.generations:
        await asyncio.sleep(0.01)
    body = (await gateway.client.get("/load")).json()
    hold.set()
    await running
    assert body["server_load"] == 1
    assert body["models"] == {"org/tiny": [{"worker_id": "w0", "num_running": 0, "num_waiting": 0, "max_num_seqs": 8,
                                            "num_blocks": 0, "num_free_blocks": 9}]}
    assert (await gateway.client.get("/load")).json()["server_load"] == 0


async def test_server_info_lists_services_and_hides_addresses(gateway: HttpGateway) -> None:
    answer = await gateway.client.get("/server_info")
    assert answer.json()["version"] == "1.2.3"
    assert [(s["service"], s["service_id"], s["state"]) for s in answer.json()["services"]] == [
        ("tokenizer", "t0", "ready")]
    assert "127.0.0.1" not in answer.text


async def test_what_a_key_is_not_for_is_left_out_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sha256:{hashlib.sha256(b'the-key').hexdigest()} models=other\n")
    async with http_gateway(api_key_file=str(file)) as gateway:
        gateway.client.headers["authorization"] = "Bearer the-key"
        document = await document_of(gateway)
        for path in ("/load", "/server_info"):
            answer = await gateway.client.get(path)
            hold_to(document, path, answer)
            assert MODEL not in answer.text
        for path in ("/model_info", "/tokenizer_info", "/v1/models/{model_id}"):
            answer = await gateway.client.get(path.replace("{model_id}", MODEL), params={"model": MODEL})
            assert answer.status_code == 403
            hold_to(document, path, answer)


async def test_the_document_has_no_status_that_only_the_framework_guessed(gateway: HttpGateway) -> None:
    document = await document_of(gateway)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert {"200", "500"} <= set(operation["responses"]), path
            is_open = path in ("/health", "/live", "/ping")
            assert ("401" in operation["responses"]) is not is_open, path


async def test_the_openapi_document_knows_bodies_and_errors(gateway: HttpGateway) -> None:
    document = (await gateway.client.get("/openapi.json")).json()
    post = document["paths"]["/v1/chat/completions"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/ChatRequest")
    assert {"200", "400", "401", "413", "503"} <= set(post["responses"])
    assert "422" not in json.dumps(document["paths"])
    names = set(document["components"]["schemas"])
    used = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert used <= names
