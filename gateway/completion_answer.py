"""Answers of /v1/completions: chunks and whole bodies of plain text, with logprobs also over an echoed prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from common.tokenized import TokenText
from gateway.logprob_shapes import CompletionLogprobs, prompt_entries
from gateway.order import Ending, Order, Piece
from gateway.responses import Envelope, reasons, with_fields

ID_PREFIX = "cmpl-"
OBJECT = "text_completion"

_TEXT, _TEXT_END = b',"text":', b',"logprobs":null,"finish_reason":null}'
_NO_TEXT = b',"text":"","logprobs":null}'


class CompletionScores:
    """The logprobs of one choice, piece by piece."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._logprobs = None if order.logprobs is None else CompletionLogprobs(
            order.logprobs, skip_special_tokens=order.skip_special_tokens, as_ids=order.return_tokens_as_token_ids)

    def of(self, piece: Piece, texts: Mapping[int, TokenText]) -> dict[str, Any] | None:
        """Those of the piece's tokens, after those of the prompt that the first piece echoes; None without any."""
        if self._logprobs is None:
            return None
        found: dict[str, Any] = {}
        if piece.prompt_logprobs and self._order.echo:
            join(found, self._logprobs.of(piece.prompt_token_ids, piece.prompt_logprobs, texts))
            self._logprobs.end_of_prompt()
        join(found, self._logprobs.of(piece.token_ids, piece.logprobs, texts))
        return found if found["tokens"] else None

    def of_prompt(self, piece: Piece, texts: Mapping[int, TokenText]) -> list[dict[str, Any] | None] | None:
        if not piece.prompt_logprobs or self._order.prompt_logprobs is None:
            return None
        return prompt_entries(piece.prompt_token_ids, piece.prompt_logprobs, self._order.prompt_logprobs, texts)


def join(logprobs: dict[str, Any], more: dict[str, Any]) -> None:
    """Each list goes on with the later one."""
    for name, values in more.items():
        logprobs.setdefault(name, []).extend(values)


class CompletionChunks:
    """`gateway.responses.ChunkWriter`."""

    def __init__(self, order: Order, envelope: Envelope) -> None:
        self._order, self._envelope = order, envelope
        self._scores: dict[int, CompletionScores] = {}
        self._is_plain = order.logprobs is None and not order.return_token_ids

    def begin(self, piece: Piece) -> bytes:
        self._envelope.begin(piece.fingerprint)
        self._scores[piece.choice] = CompletionScores(self._order)
        return b""

    def content(self, piece: Piece, texts: Mapping[int, TokenText]) -> bytes:
        choice = b'{"index":%d' % piece.choice + _TEXT + orjson.dumps(piece.text)
        if self._is_plain:
            return self._envelope.chunk(choice + _TEXT_END, piece.usage) if piece.text else b""
        more: dict[str, Any] = {"logprobs": self._scores[piece.choice].of(piece, texts), "finish_reason": None}
        if self._order.return_token_ids:
            if piece.prompt_token_ids:
                more["prompt_token_ids"] = piece.prompt_token_ids
            more["token_ids"] = piece.token_ids
        if not piece.text and not any(more.values()):
            return b""
        return self._envelope.chunk(choice + b"," + orjson.dumps(more)[1:], piece.usage)

    def finish(self, ending: Ending) -> bytes:
        choice = with_fields(
            b'{"index":%d' % ending.choice + _NO_TEXT, reasons(ending.finish_reason, ending.stop_reason))
        return self._envelope.chunk(choice, ending.usage)

    def done(self, last: Ending) -> bytes:
        return self._envelope.done(last)


@dataclass(slots=True)
class _Whole:
    """One choice of a body."""

    scores: CompletionScores
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: list[dict[str, Any] | None] | None
    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


class CompletionBody:
    """`gateway.responses.BodyWriter`."""

    def __init__(self, order: Order, envelope: Envelope) -> None:
        self._order, self._envelope = order, envelope
        self._choices: dict[int, _Whole] = {}

    def add(self, piece: Piece, texts: Mapping[int, TokenText]) -> None:
        choice = self._choices.get(piece.choice)
        if choice is None:
            scores = CompletionScores(self._order)
            choice = self._choices[piece.choice] = _Whole(
                scores, piece.prompt_token_ids, scores.of_prompt(piece, texts))
        choice.texts.append(piece.text)
        choice.token_ids += piece.token_ids
        join(choice.logprobs, choice.scores.of(piece, texts) or {})

    def finish(self, ending: Ending) -> None:
        self._choices[ending.choice].end = reasons(ending.finish_reason, ending.stop_reason)

    def body(self, last: Ending) -> bytes:
        return self._envelope.body(
            [self._choice(index, self._choices[index]) for index in sorted(self._choices)], last)

    def _choice(self, index: int, choice: _Whole) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index, "text": "".join(choice.texts), "logprobs": choice.logprobs or None, **choice.end}
        if choice.prompt_logprobs is not None:
            body["prompt_logprobs"] = choice.prompt_logprobs
        if self._order.return_token_ids:
            body |= {"prompt_token_ids": choice.prompt_token_ids, "token_ids": choice.token_ids}
        return body
