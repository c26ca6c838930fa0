"""Shapes of the OpenAI answers: stream chunks built from bytes encoded once, and whole bodies.

All chunks of a stream have one id, created, model and system_fingerprint. The role comes first, `finish_reason` is
null until the one chunk that has it, then (when asked) one chunk without choices carries the usage, then `[DONE]`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from gateway.order import Ending, Piece, Usage

DONE = b"data: [DONE]\n\n"
Kind = Literal["chat", "completion"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the two endpoints."""

    id_prefix: str
    body_object: str
    chunk_object: str
    delta_open: bytes  # before the JSON text of a content chunk's choice
    delta_close: bytes
    first: bytes  # the choice of the opening chunk; empty: there is none
    last: bytes  # the choice of the finish chunk, up to the finish reason


SHAPES: dict[Kind, Shape] = {
    "chat": Shape(
        "chatcmpl-", "chat.completion", "chat.completion.chunk",
        b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}',
        b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
        b'{"index":0,"delta":{},"logprobs":null,"finish_reason":'),
    "completion": Shape(
        "cmpl-", "text_completion", "text_completion",
        b'{"index":0,"text":', b',"logprobs":null,"finish_reason":null}', b"",
        b'{"index":0,"text":"","logprobs":null,"finish_reason":'),
}


class Chunks:
    """Server-sent events of one stream, as bytes."""

    def __init__(
        self, kind: Kind, request_id: str, model: str, *, include_usage: bool, usage_on_every_chunk: bool,
        return_token_ids: bool = False,
    ) -> None:
        self._shape = SHAPES[kind]
        self._head = {"id": self._shape.id_prefix + request_id, "object": self._shape.chunk_object,
                      "created": int(time.time()), "model": model}
        self._include_usage, self._usage_on_every_chunk = include_usage, usage_on_every_chunk
        self._return_token_ids = return_token_ids
        self._open = b""

    def begin(self, first: Piece) -> bytes:
        """What comes before any content; may be nothing. Fixes the bytes that all chunks share."""
        fields = orjson.dumps({**self._head, "system_fingerprint": first.fingerprint})
        self._open = b"data: " + fields[:-1] + b',"choices":['
        return self._chunk(self._with_ids(self._shape.first, first, prompt=True), first.usage) if (
            self._shape.first) else b""

    def content(self, piece: Piece) -> bytes:
        """The chunk of a piece; nothing when it has neither text nor token ids that were asked for."""
        if not piece.text and not (self._return_token_ids and piece.token_ids):
            return b""
        shape = self._shape
        choice = shape.delta_open + orjson.dumps(piece.text) + shape.delta_close
        return self._chunk(self._with_ids(choice, piece, prompt=not shape.first, output=True), piece.usage)

    def end(self, ending: Ending) -> bytes:
        """The finish chunk, the usage chunk when asked, and `[DONE]`."""
        reasons = orjson.dumps({"finish_reason": ending.finish_reason, "stop_reason": ending.stop_reason})
        choice = self._shape.last.removesuffix(b'"finish_reason":') + reasons[1:]
        finish = self._chunk(choice, ending.usage)
        if not self._include_usage:
            return finish + DONE
        return finish + self._open + b'],"usage":' + orjson.dumps(usage_body(ending.usage)) + b"}\n\n" + DONE

    def _with_ids(self, choice: bytes, piece: Piece, *, prompt: bool = False, output: bool = False) -> bytes:
        """The JSON of a choice with the ids that were asked for added to it."""
        if not self._return_token_ids:
            return choice
        ids: dict[str, tuple[int, ...]] = {}
        if prompt and piece.prompt_token_ids:
            ids["prompt_token_ids"] = piece.prompt_token_ids
        if output:
            ids["token_ids"] = piece.token_ids
        return choice[:-1] + b"," + orjson.dumps(ids)[1:] if ids else choice

    def _chunk(self, choice: bytes, usage: Usage) -> bytes:
        if self._usage_on_every_chunk:
            close = b'],"usage":' + orjson.dumps(usage_body(usage)) + b"}\n\n"
        else:
            close = b'],"usage":null}\n\n' if self._include_usage else b"]}\n\n"
        return self._open + choice + close


def whole_body(
    kind: Kind, request_id: str, model: str, text: str, ending: Ending,
    token_ids: tuple[list[int], list[int]] | None = None,
) -> bytes:
    """The answer of a request that does not stream. `token_ids`: those of prompt and output, when asked for."""
    shape = SHAPES[kind]
    choice: dict[str, Any] = {"index": 0}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        choice["text"] = text
    choice.update(logprobs=None, finish_reason=ending.finish_reason, stop_reason=ending.stop_reason)
    if token_ids is not None:
        choice.update(prompt_token_ids=token_ids[0], token_ids=token_ids[1])
    return orjson.dumps({
        "id": shape.id_prefix + request_id, "object": shape.body_object, "created": int(time.time()), "model": model,
        "system_fingerprint": ending.fingerprint, "choices": [choice], "usage": usage_body(ending.usage)})


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens, "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
