"""Chat answers: chunks and whole bodies of messages with content, reasoning, tool calls and logprobs."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from common.tokenized import TokenText
from gateway.chat_reader import ChatReader
from gateway.json_lists import encoded, json_list
from gateway.logprob_shapes import chat_entries, prompt_entries
from gateway.order import Ending, Order, Piece
from gateway.parsed import ContentDelta, OutputParser, ParsedDelta, ReasoningDelta, ToolCallStart
from gateway.responses import Envelope, reasons, with_fields

ID_PREFIX = "chatcmpl-"
BODY_OBJECT, CHUNK_OBJECT = "chat.completion", "chat.completion.chunk"

_ROLE = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_CONTENT, _CONTENT_END = b',"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'

OpenParser = Callable[[Order], OutputParser | None]


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How the choices of a call are read and written."""

    order: Order  # what all prompts of the call have in common
    open_parser: OpenParser
    reasoning_fields: tuple[str, ...]

    def open_reader(self) -> ChatReader:
        return ChatReader(self.open_parser(self.order), show_reasoning=self.order.include_reasoning)

    def entries(self, piece: Piece, texts: Mapping[int, TokenText]) -> list[dict[str, Any]]:
        if not piece.logprobs:
            return []
        order = self.order
        return chat_entries(piece.token_ids, piece.logprobs, order.logprobs or 0, texts,
                            as_ids=order.return_tokens_as_token_ids)

    def prompt_entries(self, piece: Piece, texts: Mapping[int, TokenText]) -> orjson.Fragment | None:
        if not piece.prompt_logprobs or self.order.prompt_logprobs is None:
            return None
        return json_list(encoded(prompt_entries(
            piece.prompt_token_ids, piece.prompt_logprobs, self.order.prompt_logprobs, texts)))


@dataclass(slots=True)
class _Streamed:
    """One choice of a stream. Token ids and logprobs wait for the chunk that shows their text."""

    reader: ChatReader
    open: bytes  # how each of its JSON objects begins
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class ChatChunks:
    """`gateway.responses.ChunkWriter`."""

    def __init__(self, style: ChatStyle, envelope: Envelope) -> None:
        self._style, self._envelope = style, envelope
        self._envelope.num_reasoning_tokens = 0
        self._returns_ids = style.order.return_token_ids
        self._choices: dict[int, _Streamed] = {}
        self._is_plain = style.order.logprobs is None and not self._returns_ids

    def begin(self, piece: Piece) -> bytes:
        self._envelope.begin(piece.fingerprint)
        choice = self._choices[piece.choice] = _Streamed(self._style.open_reader(), b'{"index":%d' % piece.choice)
        prompt_ids = {"prompt_token_ids": piece.prompt_token_ids} if self._returns_ids else {}
        return self._envelope.chunk(with_fields(choice.open + _ROLE, prompt_ids), piece.usage)

    def content(self, piece: Piece, texts: Mapping[int, TokenText]) -> bytes:
        choice = self._choices[piece.choice]
        if self._is_plain and choice.reader.is_plain:
            if not piece.text:
                return b""
            return self._envelope.chunk(
                choice.open + _CONTENT + orjson.dumps(piece.text) + _CONTENT_END, piece.usage)
        choice.logprobs += self._style.entries(piece, texts)
        if self._returns_ids:
            choice.token_ids += piece.token_ids
        num_before = choice.reader.num_reasoning_tokens
        deltas = choice.reader.read(piece)
        self._count(choice.reader.num_reasoning_tokens - num_before)
        if not deltas and choice.reader.is_plain and (choice.token_ids or choice.logprobs):
            deltas = [ContentDelta("")]
        return b"".join(self._chunk(choice, delta, piece) for delta in deltas)

    def finish(self, ending: Ending) -> bytes:
        choice = self._choices[ending.choice]
        num_before = choice.reader.num_reasoning_tokens
        deltas = choice.reader.finish()
        self._count(choice.reader.num_reasoning_tokens - num_before)
        out = b"".join(self._chunk(choice, delta, ending) for delta in deltas)
        finish = reasons(choice.reader.finish_reason(ending.finish_reason), ending.stop_reason)
        last = choice.open + b',"delta":{}' + self._extras(choice, finish)
        return out + self._envelope.chunk(last, ending.usage)

    def done(self, last: Ending) -> bytes:
        return self._envelope.done(last)

    def _chunk(self, choice: _Streamed, delta: ParsedDelta, event: Piece | Ending) -> bytes:
        shown = orjson.dumps(_delta(delta, self._style.reasoning_fields))
        return self._envelope.chunk(
            choice.open + b',"delta":' + shown + self._extras(choice, {"finish_reason": None}), event.usage)

    def _extras(self, choice: _Streamed, finish: dict[str, Any]) -> bytes:
        """What follows the delta, to the end of the choice: what has waited goes out once."""
        extras: dict[str, Any] = {"logprobs": {"content": choice.logprobs} if choice.logprobs else None, **finish}
        if self._returns_ids and choice.token_ids:
            extras["token_ids"] = choice.token_ids
        choice.logprobs, choice.token_ids = [], []
        return b"," + orjson.dumps(extras)[1:]

    def _count(self, num_reasoning_tokens: int) -> None:
        self._envelope.num_reasoning_tokens = (self._envelope.num_reasoning_tokens or 0) + num_reasoning_tokens


@dataclass(slots=True)
class _Whole:
    """One choice of a body."""

    reader: ChatReader
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)  # of each call, part by part
    logprobs: list[bytes] = field(default_factory=list)  # encoded
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def take(self, deltas: list[ParsedDelta]) -> None:
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self.content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self.reasoning.append(delta.text)
            elif isinstance(delta, ToolCallStart):
                self.calls.append({"id": new_call_id(), "type": "function", "function": {"name": delta.name}})
                self.arguments.append([])
            else:
                self.arguments[delta.index].append(delta.text)

    def message(self, reasoning_fields: tuple[str, ...]) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant", "content": content or (None if self.calls else ""), "refusal": None}
        if self.reasoning:
            message.update(dict.fromkeys(reasoning_fields, "".join(self.reasoning)))
        for call, parts in zip(self.calls, self.arguments, strict=True):
            call["function"]["arguments"] = "".join(parts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatBody:
    """`gateway.responses.BodyWriter`."""

    def __init__(self, style: ChatStyle, envelope: Envelope) -> None:
        self._style, self._envelope = style, envelope
        self._choices: dict[int, _Whole] = {}
        self._prompt_logprobs: orjson.Fragment | None = None  # all choices have the same prompt

    def add(self, piece: Piece, texts: Mapping[int, TokenText]) -> None:
        choice = self._choices.get(piece.choice)
        if choice is None:
            choice = self._choices[piece.choice] = _Whole(self._style.open_reader())
            choice.prompt_token_ids = piece.prompt_token_ids
            if self._prompt_logprobs is None:
                self._prompt_logprobs = self._style.prompt_entries(piece, texts)
        choice.take(choice.reader.read(piece))
        choice.logprobs.append(encoded(self._style.entries(piece, texts)))
        choice.token_ids += piece.token_ids

    def finish(self, ending: Ending) -> None:
        choice = self._choices[ending.choice]
        choice.take(choice.reader.finish())
        choice.end = reasons(choice.reader.finish_reason(ending.finish_reason), ending.stop_reason)

    def body(self, last: Ending) -> bytes:
        choices = [self._choice(index, self._choices[index]) for index in sorted(self._choices)]
        self._envelope.num_reasoning_tokens = sum(c.reader.num_reasoning_tokens for c in self._choices.values())
        more = {"prompt_logprobs": self._prompt_logprobs} if self._prompt_logprobs is not None else {}
        return self._envelope.body(choices, last, **more)

    def _choice(self, index: int, choice: _Whole) -> dict[str, Any]:
        has_logprobs = self._style.order.logprobs is not None
        logprobs = {"content": json_list(*choice.logprobs), "refusal": None} if has_logprobs else None
        body = {"index": index, "message": choice.message(self._style.reasoning_fields), "logprobs": logprobs,
                **choice.end}
        if self._style.order.return_token_ids:
            body |= {"prompt_token_ids": choice.prompt_token_ids, "token_ids": choice.token_ids}
        return body


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def _delta(delta: ParsedDelta, reasoning_fields: tuple[str, ...]) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ReasoningDelta):
        return dict.fromkeys(reasoning_fields, delta.text)
    if isinstance(delta, ToolCallStart):
        return {"tool_calls": [{"index": delta.index, "id": new_call_id(), "type": "function", "function": {
            "name": delta.name, "arguments": ""}}]}
    return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
