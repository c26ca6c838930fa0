"""Chunks and bodies of both endpoints, as bytes, from pieces and endings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.generation import FinishReason, ModelFacts
from common.tokenized import TokenText
from gateway.chat_answer import ChatBody, ChatChunks, ChatStyle
from gateway.completion_answer import CompletionBody, CompletionChunks
from gateway.order import Ending, Order, Piece, Usage, new_request_id
from gateway.parsed import (
    ContentDelta,
    OutputParser,
    ParsedDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.responses import BodyWriter, ChunkWriter, Envelope, Kind
from tests.fakes import fake_logprobs

USAGE = Usage(5, 2, 3)
ENDING = Ending(FinishReason.STOP, "x", USAGE, fingerprint="shoal-1", queue_s=0.25, ttft_s=0.5)
FIRST = Piece("", USAGE, prompt_token_ids=(104, 105), fingerprint="shoal-1")
ORDER = Order("id", ModelFacts('a "model"', 512, 1), "hi", 4)
BYTES: Mapping[int, TokenText] = {i: TokenText(bytes([i])) for i in range(256)} | {256: TokenText(b"<eos>", True)}
NONE: Mapping[int, TokenText] = {}
KINDS: list[Kind] = ["chat", "completion"]


def no_parser(_order: Order) -> OutputParser | None:
    return None


def chunks_of(kind: Kind, order: Order = ORDER, parser: Any = no_parser, fields: tuple[str, ...] = ("reasoning",),
              **usage: bool) -> ChunkWriter:
    envelope = Envelope("x-" + order.request_id, "o", order.model.name, **usage)
    return ChatChunks(ChatStyle(order, parser, fields), envelope) if kind == "chat" else (
        CompletionChunks(order, envelope))


def body_of(kind: Kind, order: Order = ORDER, parser: Any = no_parser, fields: tuple[str, ...] = ("reasoning",)
            ) -> BodyWriter:
    envelope = Envelope("x-" + order.request_id, "o", order.model.name)
    return ChatBody(ChatStyle(order, parser, fields), envelope) if kind == "chat" else CompletionBody(order, envelope)


def parsed(events: bytes) -> list[Any]:
    return [json.loads(e.removeprefix("data: ")) for e in events.decode().split("\n\n") if e and "[DONE]" not in e]


def streamed(writer: ChunkWriter, pieces: Sequence[Piece], texts: Mapping[int, TokenText] = BYTES) -> list[Any]:
    """The choices of all chunks of one choice, which ends with `ENDING`."""
    out = b""
    for piece in pieces:
        out += (writer.begin(piece) if piece.prompt_token_ids else b"") + writer.content(piece, texts)
    return [chunk["choices"][0] for chunk in parsed(out + writer.finish(replace(ENDING, choice=pieces[0].choice)))]


def whole(writer: BodyWriter, pieces: Sequence[Piece], texts: Mapping[int, TokenText] = BYTES) -> Any:
    for piece in pieces:
        writer.add(piece, texts)
    for choice in {piece.choice: None for piece in pieces}:
        writer.finish(replace(ENDING, choice=choice))
    return json.loads(writer.body(ENDING))


@given(st.text(min_size=1), st.sampled_from(KINDS), st.integers(0, 300))
def test_any_text_makes_one_valid_event_that_gives_it_back(text: str, kind: Kind, index: int) -> None:
    chunks = chunks_of(kind)
    chunks.begin(replace(FIRST, choice=index))
    [chunk] = parsed(chunks.content(Piece(text, USAGE, choice=index), NONE))
    choice = chunk["choices"][0]
    assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text
    assert (chunk["model"], choice["index"], choice["finish_reason"]) == ('a "model"', index, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_the_end_has_the_reason_once_the_usage_when_asked_and_done(kind: Kind, include: bool) -> None:
    chunks = chunks_of(kind, include_usage=include)
    chunks.begin(FIRST)
    [finish] = parsed(chunks.finish(ENDING))
    choice = finish["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]) == ("stop", "x", "x")
    assert ("usage" in finish) == include
    done = chunks.done(ENDING)
    assert done.endswith(b"data: [DONE]\n\n")
    assert [u["usage"]["total_tokens"] for u in parsed(done)] == ([8] if include else [])
    assert [u["metrics"] for u in parsed(done)] == (
        [{"queue_time_ms": 250.0, "time_to_first_token_ms": 500.0}] if include else [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_body_has_its_choices_in_order_with_text_and_counts(kind: Kind) -> None:
    body = whole(body_of(kind), [replace(FIRST, choice=1), FIRST, Piece("hé", USAGE), Piece("b", USAGE, choice=1)])
    texts = [c["message"]["content"] if kind == "chat" else c["text"] for c in body["choices"]]
    assert texts == ["hé", "b"]
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert body["usage"].get("completion_tokens_details") == ({"reasoning_tokens": 0} if kind == "chat" else None)


def test_each_choice_of_a_chat_begins_with_its_role() -> None:
    chunks = chunks_of("chat")
    for index in (0, 1):
        [chunk] = parsed(chunks.begin(replace(FIRST, choice=index)))
        assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunk["choices"][0]["index"] == index


def test_request_ids_are_unique_and_ordered_by_time() -> None:
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {len(i) for i in ids} == {32}
    assert [i[:12] for i in ids] == sorted(i[:12] for i in ids)


def scored(raw: bytes, cuts: Sequence[int], num_top: int, *, prompt: bytes = b"hi") -> list[Piece]:
    """The bytes in pieces; text is decoded apart, so that a piece may have tokens and no text, as when held back."""
    bounds = sorted({0, *(cut % (len(raw) + 1) for cut in cuts), len(raw)})
    pieces, decoded = [], 0
    for begin, end in pairwise(bounds):
        text = raw[:end].decode("utf-8", "ignore")
        pieces.append(Piece(
            text[decoded:], USAGE, tuple(raw[begin:end]),
            logprobs=tuple(fake_logprobs(i, num_top) for i in raw[begin:end])))
        decoded = len(text)
    prompt_logprobs = (None, *(fake_logprobs(i, num_top) for i in prompt[1:]))
    first = Piece("", USAGE, prompt_token_ids=tuple(prompt), fingerprint="s", prompt_logprobs=prompt_logprobs)
    return [first, *pieces]


@given(st.text(min_size=1, max_size=8), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 3),
       st.sampled_from([("chat", False), ("completion", False), ("completion", True)]))
def test_logprobs_of_a_stream_joined_are_those_of_the_body_however_the_pieces_are_cut(
    text: str, cuts: list[int], num_top: int, of: tuple[Kind, bool]
) -> None:
    kind, echo = of
    order = replace(ORDER, logprobs=num_top, echo=echo)
    body = whole(body_of(kind, order), scored(text.encode(), (), num_top))["choices"][0]["logprobs"]
    chunks = streamed(chunks_of(kind, order), scored(text.encode(), cuts, num_top))
    parts = [c["logprobs"] for c in chunks if c["logprobs"]]
    if kind == "chat":
        assert [entry for part in parts for entry in part["content"]] == body["content"]
        assert [bytes(entry["bytes"]) for entry in body["content"]] == [bytes([i]) for i in text.encode()]
        assert {len(entry["top_logprobs"]) for entry in body["content"]} == {num_top}
        return
    for name, values in body.items():
        assert [value for part in parts for value in part[name]] == values
    tokens = ("hi" if echo else "").encode() + text.encode()
    assert len(body["tokens"]) == len(tokens)
    shown = ("hi" if echo else "") + text
    starts = [i for i, char in enumerate(shown) for _ in char.encode()]
    assert body["text_offset"] == starts
    assert (body["token_logprobs"][0] is None) == echo
    assert all(len(top) <= num_top + 1 for top in body["top_logprobs"] if top is not None)


def test_a_token_that_is_no_whole_text_is_named_by_its_bytes_or_by_its_id() -> None:
    order = replace(ORDER, logprobs=1)
    pieces = scored("é".encode(), (), 1)
    assert whole(body_of("completion", order), pieces)["choices"][0]["logprobs"]["tokens"] == [
        "bytes:\\xc3", "bytes:\\xa9"]
    assert [e["token"] for e in whole(body_of("chat", order), pieces)["choices"][0]["logprobs"]["content"]] == [
        "\ufffd", "\ufffd"]
    named = replace(order, return_tokens_as_token_ids=True)
    logprobs = whole(body_of("completion", named), pieces)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:195", "token_id:169"]
    assert logprobs["top_logprobs"][0].keys() == {"token_id:194", "token_id:195"}
    content = whole(body_of("chat", named), pieces)["choices"][0]["logprobs"]["content"]
    assert (content[0]["token"], content[0]["bytes"], content[0]["top_logprobs"][0]["token"]) == (
        "token_id:195", [195], "token_id:194")


def test_logprobs_are_finite_and_at_most_zero() -> None:
    order = replace(ORDER, logprobs=1)
    scores = tuple(fake_logprobs(97, 1)._replace(logprob=value, top_logprobs=(value,))
                   for value in (float("-inf"), float("nan"), 1e-9))
    pieces = [FIRST, Piece("aaa", USAGE, (97, 97, 97), logprobs=scores)]
    found = whole(body_of("completion", order), pieces)["choices"][0]["logprobs"]["token_logprobs"]
    assert found == [-9999.0, -9999.0, 0.0]


def test_prompt_logprobs_name_each_token_by_id_with_rank_and_text() -> None:
    order = replace(ORDER, prompt_logprobs=1)
    expected = [None, {"104": {"logprob": -0.1, "rank": 1, "decoded_token": "h"},
                       "105": {"logprob": -0.2, "rank": 2, "decoded_token": "i"}}]
    pieces = scored(b"", (), 2)  # the engine may give more than was asked for here
    assert whole(body_of("completion", order), pieces)["choices"][0]["prompt_logprobs"] == expected
    assert whole(body_of("chat", order), pieces)["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in whole(body_of("chat", ORDER), pieces)


class Parser:
    """`<..>` is reasoning, `name(args)` a call, the rest content. Holds a mark back until the next text."""

    def __init__(self) -> None:
        self._mode, self._num_calls, self._held = "content", 0, ""

    def push(self, text: str) -> list[ParsedDelta]:
        out: list[ParsedDelta] = []
        for char in text:
            if char in "<>()":
                self._turn(char, out)
            elif self._mode == "name":
                self._held += char
            elif self._mode == "reasoning":
                out.append(ReasoningDelta(char))
            elif self._mode == "arguments":
                out.append(ToolCallArguments(self._num_calls - 1, char))
            elif char == "@":
                self._mode = "name"
            else:
                out.append(ContentDelta(char))
        return out

    def _turn(self, char: str, out: list[ParsedDelta]) -> None:
        if char == "(":
            out.append(ToolCallStart(self._num_calls, self._held))
            self._num_calls, self._held = self._num_calls + 1, ""
        self._mode = {"<": "reasoning", "(": "arguments"}.get(char, "content")

    def finish(self) -> list[ParsedDelta]:
        held, self._held = self._held, ""
        return [ContentDelta("@" + held)] if self._mode == "name" else []


def with_parser(_order: Order) -> OutputParser | None:
    return Parser()


def pieces_of(text: str, size: int) -> list[Piece]:
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return [FIRST, *(Piece(part, USAGE, tuple(part.encode())) for part in parts)]


def joined_calls(deltas: list[Any]) -> list[Any]:
    calls: list[Any] = []
    for delta in deltas:
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return calls


@pytest.mark.parametrize("size", [1, 3, 100])
def test_calls_reasoning_and_content_are_the_same_streamed_and_whole(size: int) -> None:
    text, fields = '<hm so>@add({"a":2})@weather({"city":"Tokyo"})', ("reasoning", "reasoning_content")
    chunks = streamed(chunks_of("chat", parser=with_parser, fields=fields), pieces_of(text, size))
    deltas = [c["delta"] for c in chunks]
    body = whole(body_of("chat", parser=with_parser, fields=fields), pieces_of(text, size))
    choice = body["choices"][0]
    message, calls = choice["message"], joined_calls(deltas)
    assert message["content"] is None
    assert message["reasoning"] == message["reasoning_content"] == "hm so"
    assert "".join(d.get("reasoning", "") for d in deltas) == "hm so"
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    for found in (calls, message["tool_calls"]):
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == [
            ("add", '{"a":2}'), ("weather", '{"city":"Tokyo"}')]
        assert all(c["type"] == "function" and len(c["id"]) == len("call_") + 24 for c in found)
        assert len({c["id"] for c in found}) == 2
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    if size == 1:
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<hm so")}


def test_a_call_that_the_limit_cut_off_finishes_by_length_and_held_text_is_released() -> None:
    writer = chunks_of("chat", parser=with_parser)
    writer.begin(FIRST)
    writer.content(Piece("@f({", USAGE), NONE)
    cut = replace(ENDING, finish_reason=FinishReason.LENGTH)
    assert parsed(writer.finish(cut))[-1]["choices"][0]["finish_reason"] == "length"
    choices = streamed(chunks_of("chat", parser=with_parser), pieces_of("yes @fal", 1))
    assert "".join(c["delta"].get("content", "") for c in choices) == "yes @fal"
    assert choices[-1]["finish_reason"] == "stop"


def test_reasoning_may_be_left_out_and_is_counted_all_the_same() -> None:
    order = replace(ORDER, include_reasoning=False)
    body = whole(body_of("chat", order, with_parser), pieces_of("<hm>yes", 1))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "yes", "refusal": None}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@given(st.text("ab<>@()é", max_size=12), st.integers(1, 4))
def test_logprobs_and_ids_of_text_that_a_parser_keeps_are_neither_lost_nor_repeated(text: str, size: int) -> None:
    order = replace(ORDER, logprobs=0, return_token_ids=True)
    pieces = [replace(p, logprobs=tuple(fake_logprobs(i, 0) for i in p.token_ids)) for p in pieces_of(text, size)]
    chunks = streamed(chunks_of("chat", order, with_parser), pieces)
    entries = [entry for c in chunks if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert [i for c in chunks for i in c.get("token_ids", ())] == list(text.encode())
    assert [i for entry in entries for i in entry["bytes"]] == list(text.encode())
