"""Faults of chats that other servers shipped, over HTTP on real processes: tool calls, templates, addresses to fetch.

The model's template shows the last message and nothing else, and the runner says it again: any text can be forced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.e2e.api import Api, api_of, refusal
from tests.factories import tiny_llama
from tests.http_gateway import events
from tests.stack import RunningStack

# The comment says in which format calls are read.
TEMPLATE = """{#- <tool_call> -#}
{%- set said = messages[-1].content -%}
{%- if said == "LOOPS" -%}
  {%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif said == "DUNDER" -%}{{ said.__class__.__mro__[1].__subclasses__() }}
{%- elif said == "WRITES" -%}{{ messages.append(messages[0]) }}
{%- else -%}{{ said }}
{%- endif -%}"""
LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
DUNDER = "{{ ''.__class__.__mro__[1].__subclasses__() }}"

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields}}}
         for name, fields in (("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
                              ("weather", {"city": {"type": "string"}}))]
ARGUMENTS = [("add", {"a": 2, "b": 2}), ("weather", {"city": "Tokyo 日本"})]
CALLS = "\n".join(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
                  for name, arguments in ARGUMENTS)


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    model = tiny_llama(
        tmp_path_factory.mktemp("model") / "speaker", tokenizer_from=smollm2, max_position_embeddings=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with RunningStack(tmp_path_factory.mktemp("stack"), model=model, runner="mock-echo", kvstore=0, router=0,
                      env={"SHOAL_DECODE_MOCK_STEP_S": "0.005"}) as running:
        yield running


@pytest.fixture
async def api(stack: RunningStack) -> AsyncIterator[Api]:
    """Whatever a test does, no service may have had a fault that it did not expect."""
    async with api_of(stack, echoes=True) as opened:
        yield opened
    for name in ("gateway-0", "tokenizer-0", "mixed-0"):
        assert "Traceback" not in stack.log(name)


class Reply(NamedTuple):
    """One choice, whole or joined; a call is (id, name, arguments as text)."""

    content: str
    calls: list[tuple[str, str, str]]
    finish_reason: str

    @property
    def without_ids(self) -> tuple[str, list[tuple[str, str]], str]:
        return self.content, [(name, arguments) for _, name, arguments in self.calls], self.finish_reason


async def say(api: Api, text: str, **changes: Any) -> httpx2.Response:
    answer = await api.chat(messages=[{"role": "user", "content": text}], **{"max_tokens": 400, **changes})
    assert answer.status_code == 200, answer.text
    return answer


def whole_reply(answer: httpx2.Response) -> Reply:
    (choice,) = answer.json()["choices"]
    calls = choice["message"].get("tool_calls") or []
    assert all(call["type"] == "function" for call in calls)
    return Reply(choice["message"]["content"] or "",
                 [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
                 choice["finish_reason"])


def streamed_reply(answer: httpx2.Response) -> Reply:
    """Fails unless indexes count from 0, an id and a name come in the first delta of each alone, and one chunk ends."""
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    calls: list[list[str]] = []
    for delta in (part for choice in choices for part in choice["delta"].get("tool_calls") or ()):
        function = delta["function"]
        if delta["index"] == len(calls):
            assert (delta["type"], delta["id"] != "", function["name"] != "") == ("function", True, True)
            calls.append([delta["id"], function["name"], function.get("arguments", "")])
        else:
            assert delta["index"] == len(calls) - 1
            assert not delta.get("id")
            assert not function.get("name")
            calls[-1][2] += function["arguments"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return Reply("".join(choice["delta"].get("content") or "" for choice in choices),
                 [(call[0], call[1], call[2]) for call in calls], choices[-1]["finish_reason"])


async def test_parallel_calls_have_an_index_an_id_and_a_name_each_in_a_stream_as_in_a_whole_answer(api: Api) -> None:
    """B07"""
    for lead in ("", "I will look both up.\n"):
        whole = whole_reply(await say(api, lead + CALLS, tools=TOOLS))
        streamed = streamed_reply(await say(api, lead + CALLS, tools=TOOLS, stream=True))
        for reply in (whole, streamed):
            assert [(name, json.loads(arguments)) for _, name, arguments in reply.calls] == ARGUMENTS
            assert len({call_id for call_id, _, _ in reply.calls} - {""}) == 2
            assert (reply.content.strip(), reply.finish_reason) == (lead.strip(), "tool_calls")
        assert streamed.without_ids == whole.without_ids


async def test_calls_cut_anywhere_are_the_same_streamed_and_whole(api: Api) -> None:
    """B07"""
    num_tokens = len(await api.tokens(prompt=CALLS))
    cuts = range(1, num_tokens + 1, 3)
    whole = await asyncio.gather(*(say(api, CALLS, tools=TOOLS, max_tokens=cut) for cut in cuts))
    streamed = await asyncio.gather(*(say(api, CALLS, tools=TOOLS, max_tokens=cut, stream=True) for cut in cuts))
    replies = [whole_reply(answer).without_ids for answer in whole]
    assert [streamed_reply(answer).without_ids for answer in streamed] == replies
    assert {reason for *_, reason in replies[:-1]} == {"length"}
    assert len({len(calls) for _, calls, _ in replies}) > 1


async def test_calls_are_plain_text_where_no_tool_may_be_called(api: Api) -> None:
    """B08"""
    for changes in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto"}):
        for reply in (whole_reply(await say(api, CALLS, **changes)),
                      streamed_reply(await say(api, CALLS, **changes, stream=True))):
            assert (reply.content, reply.calls, reply.finish_reason) == (CALLS, [], "stop"), changes


@pytest.mark.parametrize("stream", [False, True])
async def test_a_template_that_a_client_brings_is_refused_and_never_rendered(api: Api, stream: bool) -> None:
    """B18"""
    async with api.unharmed():
        for template in (LOOPS, DUNDER):
            for change, param in (
                ({"chat_template": template}, "chat_template"),
                ({"chat_template_kwargs": {"chat_template": template}}, "chat_template_kwargs.chat_template"),
                ({"chat_template_kwargs": {"messages": template}}, "chat_template_kwargs.messages"),
            ):
                refusal(await api.chat(**change, stream=stream), [400], param=param)
            body = {"model": api.stack.model, "messages": [{"role": "user", "content": "hi"}],
                    "chat_template": template}
            refusal(await api.client.post("/tokenize", json=body), [400], param="chat_template")
        for said in (LOOPS, DUNDER):  # text is text
            assert whole_reply(await say(api, said)).content == said


@pytest.mark.parametrize("poison", ["LOOPS", "DUNDER", "WRITES"])
async def test_a_poisoned_template_of_a_model_is_bounded_and_others_are_served_meanwhile(
    api: Api, poison: str
) -> None:
    """B18"""
    asked = asyncio.create_task(api.chat(messages=[{"role": "user", "content": poison}]))
    async with asyncio.timeout(30), api.unharmed():
        while not asked.done():
            assert await api.is_alive()
    refusal(await asked, [400], param="messages")


@asynccontextmanager
async def listener(location: str = "") -> AsyncIterator[tuple[str, list[str]]]:
    """A server on loopback: its URL and the request lines that it got; with `location` it redirects there."""
    asked: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode())
        status = f"302 Found\r\nLocation: {location}" if location else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/picture.png", asked


async def test_addresses_in_a_message_are_refused_and_nobody_fetches_them(api: Api) -> None:
    """B19"""
    async with listener() as (inner, hits), listener(inner) as (outer, outer_hits), api.unharmed():
        for url in (inner, outer, inner.replace("127.0.0.1", "localhost"), "http://169.254.169.254/latest/meta-data/",
                    "file:///etc/passwd", "http://pictures.invalid/1.png", "data:image/png;base64,AAAA"):
            parts: list[dict[str, Any]] = [
                {"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "file", "file": {"file_data": url}}, {"type": "input_image", "image_url": url},
                {"type": "video_url", "video_url": {"url": url}}]
            for part in parts:
                messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
                param = "messages.0.content.1.type"
                refusal(await api.chat(messages=messages), [400], param=param)
                refusal(await api.chat(messages=messages, stream=True), [400], param=param)
                body = {"model": api.stack.model, "messages": messages}
                refusal(await api.client.post("/tokenize", json=body), [400], param=param)
        assert (hits, outer_hits) == ([], [])
        async with httpx2.AsyncClient(follow_redirects=True) as client:  # they do count
            assert (await client.get(outer)).status_code == 200
        assert (len(hits), len(outer_hits)) == (1, 1)
