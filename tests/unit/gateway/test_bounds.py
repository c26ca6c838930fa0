"""What one request may cost: entries of prompt logprobs, and deltas that wait for a reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest, ReaderTooSlow
from common.generation import FinishReason, Generation, ModelFacts, WorkerView
from common.tokenized import TokenText
from gateway.attempts import AttemptLimits
from gateway.batch import run_all
from gateway.chat_answer import ChatBody, ChatStyle
from gateway.completion_answer import CompletionBody, CompletionChunks
from gateway.json_lists import SLICE, encoded, json_list
from gateway.order import MAX_PROMPT_ENTRIES, Ending, Order, Piece, PromptEntries, Usage
from gateway.pipeline import Pipeline, PipelineLimits
from gateway.responses import BodyWriter, Envelope
from tests.fakes import FINGERPRINT, MODEL, FakeDecode, FakeTokenizer, Step, fake_logprobs, says
from tests.unit.gateway.bodies import complete, completions

ORDER = Order("r1", ModelFacts(MODEL, 100_000, 1), "hi", 4)
USAGE = Usage(5, 2, 3)


def ordered(**changes: Any) -> Order:
    """An order of a call of its own."""
    return replace(ORDER, prompt_entries=PromptEntries(), **changes)


def run(decode: FakeDecode, *orders: Order) -> Any:
    pipeline = Pipeline(FakeTokenizer(), decode, None, PipelineLimits(AttemptLimits(0.3, 3), 16))
    return aclosing(run_all(pipeline, orders, asyncio.get_running_loop().time() + 20, 4, lambda _placed: None))


async def refusal(*orders: Order) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        await num_endings(FakeDecode(says("x")), *orders)
    return caught.value


async def num_endings(decode: FakeDecode, *orders: Order) -> int:
    async with run(decode, *orders) as events:
        return len([event async for event in events if isinstance(event, Ending)])


async def ends_well(*orders: Order) -> int:
    return await num_endings(FakeDecode(says("x")), *orders)


async def test_more_logprobs_of_prompts_than_one_answer_has_are_refused_by_the_field_that_asks_for_them() -> None:
    fits = "x" * (MAX_PROMPT_ENTRIES // (64 * 21))
    assert await ends_well(ordered(prompt=fits, n=64, prompt_logprobs=20)) == 64
    beyond = await refusal(ordered(prompt=fits + "x", n=64, prompt_logprobs=20))
    assert beyond.param == "prompt_logprobs"
    assert str(MAX_PROMPT_ENTRIES) in beyond.message
    assert (await refusal(ordered(prompt=fits + "x", n=64, logprobs=20, echo=True))).param == "logprobs"
    assert await ends_well(ordered(prompt=fits + "x", n=64, logprobs=20)) == 64


async def test_the_prompts_of_a_call_count_together_and_those_of_another_call_do_not() -> None:
    def call(num_prompts: int) -> list[Order]:
        made = completions(prompt=["x" * 12_000] * num_prompts, prompt_logprobs=20, max_tokens=4)
        return [replace(order, model=ORDER.model) for order in made]

    assert await ends_well(*call(7)) == 7
    assert (await refusal(*call(8))).param == "prompt_logprobs"
    assert await ends_well(*call(7)) == 7


async def test_lm_eval_asks_for_far_less_than_the_limit() -> None:
    order = complete(prompt="x" * 4000, max_tokens=1, logprobs=1, echo=True)
    assert await ends_well(replace(order, model=ORDER.model)) == 1


class Counted(dict[int, TokenText]):
    num_reads = 0

    def __getitem__(self, token_id: int) -> TokenText:
        self.num_reads += 1
        return super().__getitem__(token_id)


@pytest.mark.parametrize("what", ["chat", "completion", "echo", "stream"])
def test_entries_of_a_prompt_are_made_once_for_all_its_choices(what: str) -> None:
    prompt = bytes(range(97, 123)) * 20
    scores = (None, *(fake_logprobs(i, 2) for i in prompt[1:]))

    def num_reads(n: int) -> tuple[int, bytes]:
        asked = {"prompt_logprobs": 2} if what in ("chat", "completion") else {"logprobs": 2, "echo": True}
        order, texts = ordered(n=n, **asked), Counted({i: TokenText(bytes([i])) for i in range(256)})
        pieces = [Piece("", USAGE, (), tuple(prompt), "f", choice, (), scores) for choice in range(n)]
        if what == "stream":
            chunks = CompletionChunks(order, Envelope("i", "o", "m"))
            out = b"".join(chunks.begin(piece) + chunks.content(piece, texts) for piece in pieces)
            return texts.num_reads, out
        body: BodyWriter = ChatBody(ChatStyle(order, lambda _: None, ("reasoning",)), Envelope("i", "o", "m")) if (
            what == "chat") else CompletionBody(order, Envelope("i", "o", "m"))
        for piece in pieces:
            body.add(piece, texts)
        for choice in range(n):
            body.finish(Ending(FinishReason.LENGTH, None, USAGE, choice=choice))
        return texts.num_reads, body.body(Ending(FinishReason.LENGTH, None, USAGE))
        return texts.num_reads, out

    (once, one), (shared, four) = num_reads(1), num_reads(4)
    assert once == shared
    decoded = b'"decoded_token":"b","logprob"' if what in ("chat", "completion") else b'"text_offset":[0,1,2,'
    assert four.count(decoded) == (1 if what == "chat" else 4) * one.count(decoded)


@given(st.lists(st.integers() | st.text() | st.none(), max_size=20), st.integers(0, 20), st.integers(0, 2 * SLICE))
def test_a_list_encoded_in_parts_and_slices_is_the_list(items: list[Any], cut: int, num_more: int) -> None:
    items = [item if not isinstance(item, int) else item % 2**53 for item in items] + list(range(num_more))
    assert orjson.loads(orjson.dumps(json_list(encoded(items[:cut]), encoded(items[cut:])))) == items


def scripted(texts: Sequence[bytes], num_steps: int) -> Any:
    def script(_worker: str, generation: Generation) -> list[Step]:
        return [texts[generation.choice]] * num_steps

    return script


async def test_while_several_choices_are_not_read_neither_is_their_worker_and_nothing_is_lost() -> None:
    num_steps = 400
    decode = FakeDecode(scripted((b"ab" * 100, b"cd" * 100), num_steps), max_model_len=1_000_000)
    order = ordered(model=ModelFacts(MODEL, 1_000_000, 1), n=2, max_tokens=500_000, logprobs=5)
    async with run(decode, order) as events:
        texts = [(await anext(events)).text, ""]
        before = -1
        while before != decode.num_tokens_sent:  # until the worker is no longer read
            before = decode.num_tokens_sent
            await asyncio.sleep(0.1)
        assert before < 2 * num_steps * 200 // 2
        async for event in events:
            if isinstance(event, Piece):
                texts[event.choice] += event.text
    assert texts == ["ab" * 100 * num_steps, "cd" * 100 * num_steps]


async def test_a_choice_that_has_ended_takes_no_room_from_those_that_go_on() -> None:
    num_steps = 400
    decode = FakeDecode(scripted((b"a" * 200 + b"S", b"b" * 200), num_steps), max_model_len=1_000_000)
    order = ordered(
        model=ModelFacts(MODEL, 1_000_000, 1), n=2, max_tokens=500_000, logprobs=5, stop=("S",))
    texts = ["", ""]
    async with run(decode, order) as events:
        async for event in events:
            if isinstance(event, Piece):
                texts[event.choice] += event.text
    assert texts == ["a" * 200, "b" * 200 * num_steps]


async def test_a_stream_that_is_read_too_slowly_is_not_tried_on_another_worker() -> None:
    two = [WorkerView(f"w{i}", MODEL, FINGERPRINT, 512, 8, num_free_blocks=9) for i in range(2)]
    decode = FakeDecode(lambda _w, _g: [b"a", ReaderTooSlow("slow")], two)
    with pytest.raises(ReaderTooSlow):
        await num_endings(decode, ordered())
    assert len(decode.placed) == 1


async def test_a_prompt_cut_to_the_context_leaves_room_for_the_output_of_a_chat_that_names_no_limit() -> None:
    for context, kept in ((512, 496), (20, 10), (1, 1)):
        decode = FakeDecode(says("y" * 600), max_model_len=context)
        order = ordered(model=ModelFacts(MODEL, context, 1), prompt="x" * 600, max_tokens=None,
                        truncate_prompt_tokens=-1)
        if context == 1:
            assert (await refusal(order)).code == "context_length_exceeded"
            continue
        async with run(decode, order) as events:
            usage = [event.usage async for event in events][-1]
        assert (usage.num_prompt_tokens, usage.num_output_tokens) == (kept, context - kept)
