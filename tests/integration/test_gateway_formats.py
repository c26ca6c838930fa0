"""What a chat with tools gets while the tokenizer service is slow to describe the model, over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from common.errors import Unavailable
from common.tokenized import ModelText
from tests.fakes import FakeDecode, FakeTokenizer, says
from tests.http_gateway import M0, http_gateway, until

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class SlowToDescribe(FakeTokenizer):
    def __init__(self) -> None:
        super().__init__()
        self.described = asyncio.Event()
        self.is_away = False

    async def describe(self, model: str) -> ModelText:
        if self.is_away:
            raise Unavailable("no replica")
        await self.described.wait()
        return replace(await super().describe(model), chat_template="<tool_call></tool_call>")


async def test_a_slow_description_is_waited_for_and_the_calls_are_read() -> None:
    tokenizer = SlowToDescribe()
    async with http_gateway(FakeDecode(script=says(CALL, per_step=64)), tokenizer) as gateway:
        running = asyncio.create_task(gateway.chat(tools=TOOLS, max_tokens=200))
        await until(lambda: gateway.admission.num_running == 1, "the request is in work")
        await asyncio.sleep(2.2)
        assert not running.done()
        tokenizer.described.set()
        answer = (await running).json()["choices"][0]
        assert (answer["finish_reason"], answer["message"]["tool_calls"][0]["function"]["name"]) == ("tool_calls", "f")


async def test_without_a_description_the_answer_is_503_and_never_a_guess() -> None:
    tokenizer = SlowToDescribe()
    tokenizer.is_away = True
    async with http_gateway(FakeDecode(script=says(CALL)), tokenizer) as gateway:
        answer = await gateway.chat(tools=TOOLS)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
        assert not gateway.decode.generations


async def test_the_wait_ends_with_the_deadline_and_with_the_client() -> None:
    async with http_gateway(tokenizer=SlowToDescribe()) as gateway:
        answer = await gateway.chat(headers={"x-stainless-read-timeout": "0.2"}, tools=TOOLS)
        assert answer.status_code == 504
        _reader, writer = await gateway.raw("/v1/chat/completions", M0)
        await until(lambda: gateway.admission.num_running == 1, "the request is in work")
        writer.close()
        await writer.wait_closed()
        await until(lambda: gateway.admission.num_running == 0, "the slot is free")
