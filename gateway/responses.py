"""What the answers of both generation endpoints share: the shape around choices, as stream chunks and whole bodies.

All chunks of a stream have one id, created, model and system_fingerprint. The role comes first, `finish_reason` is
null until the one chunk of each choice that has it, then (when asked) one chunk without choices carries the usage,
then `[DONE]`. What all chunks share is encoded once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import orjson

from common.tokenized import TokenText
from gateway.order import Ending, Piece, Usage

DONE = b"data: [DONE]\n\n"
Kind = Literal["chat", "completion"]


class ChunkWriter(Protocol):
    """Server-sent events of one stream, as bytes. `texts` has those of a piece's tokens where it has logprobs."""

    def begin(self, piece: Piece) -> bytes:
        """What comes before any content of a choice, given its first piece; may be nothing."""

    def content(self, piece: Piece, texts: Mapping[int, TokenText]) -> bytes:
        """The chunks of a piece; nothing when it has nothing that the client sees yet."""

    def finish(self, ending: Ending) -> bytes:
        """What was held back of a choice, and its finish chunk."""

    def done(self, last: Ending) -> bytes:
        """After the last choice: the usage chunk when asked, and `[DONE]`."""


class BodyWriter(Protocol):
    """The answer of a call that does not stream."""

    def add(self, piece: Piece, texts: Mapping[int, TokenText]) -> None: ...

    def finish(self, ending: Ending) -> None: ...

    def body(self, last: Ending) -> bytes: ...


class Envelope:
    """The part of an answer outside its choices."""

    def __init__(
        self, id_: str, object_: str, model: str, *, include_usage: bool = False, usage_on_every_chunk: bool = False
    ) -> None:
        self._head = {"id": id_, "object": object_, "created": int(time.time()), "model": model}
        self._include_usage, self._usage_on_every_chunk = include_usage, usage_on_every_chunk
        self._open = b""
        self._close = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self.num_reasoning_tokens: int | None = None  # of all choices so far; None: not told

    def begin(self, fingerprint: str) -> None:
        """Fixes the bytes that all chunks share; only the first call does."""
        if not self._open:
            fields = orjson.dumps({**self._head, "system_fingerprint": fingerprint})
            self._open = b"data: " + fields[:-1] + b',"choices":['

    def chunk(self, choice: bytes, usage: Usage) -> bytes:
        if self._usage_on_every_chunk:
            return self._open + choice + b'],"usage":' + orjson.dumps(self._usage(usage)) + b"}\n\n"
        return self._open + choice + self._close

    def done(self, last: Ending) -> bytes:
        if not self._include_usage:
            return DONE
        facts = orjson.dumps({"usage": self._usage(last.usage), "metrics": _metrics(last)})
        return self._open + b"]," + facts[1:] + b"\n\n" + DONE

    def body(self, choices: list[dict[str, Any]], last: Ending, **more: Any) -> bytes:
        return orjson.dumps({
            **self._head, "system_fingerprint": last.fingerprint, "choices": choices, "usage": self._usage(last.usage),
            **more, "metrics": _metrics(last)})

    def _usage(self, usage: Usage) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt_tokens": usage.num_prompt_tokens, "completion_tokens": usage.num_output_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens}}
        if self.num_reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return body


def reasons(finish_reason: str, stop_reason: str | int | None) -> dict[str, Any]:
    """Why a choice ended: OpenAI's word, and the stop string or token id as vLLM and as SGLang name it."""
    return {"finish_reason": finish_reason, "stop_reason": stop_reason, "matched_stop": stop_reason}


def with_fields(choice: bytes, fields: Mapping[str, Any]) -> bytes:
    """The JSON object with more fields at its end."""
    return choice[:-1] + b"," + orjson.dumps(fields)[1:] if fields else choice


def _metrics(last: Ending) -> dict[str, float]:
    return {"queue_time_ms": round(last.queue_s * 1000, 3), "time_to_first_token_ms": round(last.ttft_s * 1000, 3)}
