"""Every way to ask for a shape of output, over HTTP on a computed model of random weights: nothing but the grammar can
make its output fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.api import Api, api_of, refusal
from tests.factories import tiny_llama
from tests.http_gateway import events, text_of
from tests.stack import RunningStack

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["city", "sunny"],
    "properties": {"city": {"enum": ["Oslo", "São Paulo"]}, "sunny": {"type": "boolean"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}}]
EBNF = 'root ::= "<" name ("/" | " /")? ">"\nname ::= [xyz]{1,3}'
Fits = Callable[[str], bool]


def fits_schema(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_tag(text: str) -> bool:
    return re.fullmatch("<[xyz]{1,3}( ?/)?>", text) is not None


def is_pair(text: str) -> bool:
    return re.fullmatch(r"[a-c]{2}-[0-9]{3}", text) is not None


def is_colour(text: str) -> bool:
    return text in ("red", "light blue")


SHAPES: list[tuple[dict[str, Any], Fits]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, fits_schema),
    ({"structured_outputs": {"json": SCHEMA}}, fits_schema), ({"json_schema": json.dumps(SCHEMA)}, fits_schema),
    ({"structured_outputs": {"regex": "[a-c]{2}-[0-9]{3}"}}, is_pair), ({"regex": "[a-c]{2}-[0-9]{3}"}, is_pair),
    ({"structured_outputs": {"choice": ["red", "light blue"]}}, is_colour),
    ({"guided_choice": ["red", "light blue"]}, is_colour),
    ({"structured_outputs": {"grammar": "start: /[a-c]{2}/ \"-\" /[0-9]{3}/"}}, is_pair),
    ({"structured_outputs": {"grammar": EBNF}}, is_tag), ({"ebnf": EBNF}, is_tag)]


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    model = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", seed=5, tokenizer_from=smollm2)
    with RunningStack(tmp_path_factory.mktemp("stack"), model=model, runner="torch", kvstore=0, router=0) as running:
        yield running


@pytest.fixture
async def api(stack: RunningStack) -> AsyncIterator[Api]:
    async with api_of(stack) as opened:
        yield opened


@pytest.mark.parametrize(
    ("sent", "fits"), SHAPES, ids=[f"{i} {next(iter(sent))}" for i, (sent, _) in enumerate(SHAPES)])
async def test_an_output_has_the_shape_that_was_asked_for(api: Api, sent: dict[str, Any], fits: Fits) -> None:
    for changes in ({"temperature": 0}, {"temperature": 1.5, "seed": 7}):
        body = {**sent, **changes, "max_tokens": 120}
        (choice,) = (await api.chat(**body)).json()["choices"]
        text = choice["message"]["content"]
        assert choice["finish_reason"] == "stop", text
        assert fits(text), text
        assert text_of(events((await api.chat(**body, stream=True)).text)) == text
        completed = (await api.complete("q:", **body)).json()["choices"][0]["text"]
        assert fits(completed), completed


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_has_to_be_made_is_made_and_its_arguments_fit(api: Api, stream: bool) -> None:
    """B08"""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, names in (("required", ("weather", "time")), (named, ("weather",))):
        answer = await api.chat(
            tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=120, temperature=1.5, seed=3,
            stream=stream)
        assert answer.status_code == 200, answer.text
        (call,) = streamed_calls(answer.text) if stream else answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMA if call["function"]["name"] == "weather" else {"maxProperties": 0})


def streamed_calls(body: str) -> list[dict[str, Any]]:
    """The calls of the only choice of a stream, whole."""
    calls: list[dict[str, Any]] = []
    for chunk in events(body)[:-1]:
        for delta in (d for c in chunk["choices"] for d in c["delta"].get("tool_calls", ())):
            if delta["index"] == len(calls):
                calls.append({"id": delta["id"], "function": {"name": delta["function"]["name"], "arguments": ""}})
            calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments", "")
    return calls


async def test_a_choice_of_a_tool_that_is_not_there_is_refused_and_none_without_tools_is_plain_text(api: Api) -> None:
    """B08"""
    nope = {"type": "function", "function": {"name": "nope"}}
    async with api.unharmed():
        refusal(await api.chat(tools=TOOLS, tool_choice=nope), [400], param="tool_choice")
        for tools in (None, []):
            refusal(await api.chat(tools=tools, tool_choice="required"), [400], param="tool_choice")
            for choice in ("none", "auto"):
                answer = await api.chat(tools=tools, tool_choice=choice)
                assert answer.status_code == 200
                assert isinstance(answer.json()["choices"][0]["message"]["content"], str)


async def test_all_choices_of_a_request_have_the_shape(api: Api) -> None:
    body = (await api.chat(regex="[a-c]{2}-[0-9]{3}", n=4, temperature=1.5, seed=1, max_tokens=40)).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert all(map(is_pair, texts)), texts
    assert len(set(texts)) > 1


async def test_a_second_constraint_and_a_grammar_without_any_output_are_refused_before_any_token(api: Api) -> None:
    """B09"""
    before = await api.metric("shoal_generated_tokens_total")
    async with api.unharmed():
        for stream in (False, True):
            refusal(await api.chat(regex="a", guided_choice=["b"], stream=stream), [400], param="guided_choice")
            refusal(await api.chat(ebnf='root ::= root "a"', stream=stream), [400], param="ebnf")
            refusal(await api.chat(ebnf="root ::= [z-a]", stream=stream), [400], param="ebnf")
            refusal(await api.chat(structured_outputs={"grammar": "start: (("}, stream=stream), [400],
                    param="structured_outputs.grammar")
            refusal(await api.chat(structured_outputs={"choice": []}, stream=stream), [400],
                    param="structured_outputs.choice")
    beside_and_alive = 60 + 4  # tokens that `unharmed` has drawn itself
    assert await api.metric("shoal_generated_tokens_total") - before <= beside_and_alive
