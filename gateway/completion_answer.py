"""Answers of /v1/completions: chunks and whole bodies of plain text, with logprobs also over an echoed prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from common.tokenized import TokenText
from gateway.json_lists import SLICE, encoded, json_list
from gateway.logprob_shapes import CompletionLogprobs, prompt_entries
from gateway.order import Ending, Order, Piece
from gateway.responses import Envelope, reasons, with_fields

ID_PREFIX = "cmpl-"
OBJECT = "text_completion"

_TEXT, _TEXT_END = b',"text":', b',"logprobs":null,"finish_reason":null}'
_NO_TEXT = b',"text":"","logprobs":null}'


@dataclass(frozen=True, slots=True)
class PromptScores:
    """What all choices of one prompt show of its logprobs, encoded."""

    entries: orjson.Fragment | None  # of `prompt_logprobs`; None: not asked for
    echoed: dict[str, bytes]  # of `logprobs`, before those of the output, without brackets; empty without
    num_chars: int = 0  # of the echoed text


class CallScores:
    """The logprobs of all choices of a call, those of each prompt shaped and encoded once."""

    def __init__(self, order: Order) -> None:
        self._order = order  # what all prompts of the call have in common
        self._prompts: dict[int, PromptScores] = {}

    def open(self, first: Piece, texts: Mapping[int, TokenText]) -> ChoiceScores:
        """Those of a choice, given its first piece."""
        index = first.choice // self._order.n
        if index not in self._prompts:
            self._prompts[index] = self._of_prompt(first, texts)
        prompt = self._prompts[index]
        return ChoiceScores(prompt, _logprobs(self._order, prompt.num_chars))

    def _of_prompt(self, first: Piece, texts: Mapping[int, TokenText]) -> PromptScores:
        order, ids, scores = self._order, first.prompt_token_ids, first.prompt_logprobs
        entries = json_list(encoded(prompt_entries(ids, scores, order.prompt_logprobs, texts))) if (
            scores and order.prompt_logprobs is not None) else None
        logprobs = _logprobs(order)
        if logprobs is None or not scores or not order.echo:
            return PromptScores(entries, {})
        parts: dict[str, list[bytes]] = {}
        for begin in range(0, len(ids), SLICE):
            part = slice(begin, begin + SLICE)
            for name, values in logprobs.of(
                    ids[part], scores[part], texts, first.text[: first.num_echoed_chars]).items():
                parts.setdefault(name, []).append(encoded(values))
        return PromptScores(entries, {name: b",".join(made) for name, made in parts.items()}, logprobs.end())


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """The logprobs of one choice, piece by piece."""

    prompt: PromptScores
    logprobs: CompletionLogprobs | None  # None: not asked for

    def of(self, piece: Piece, texts: Mapping[int, TokenText]) -> dict[str, bytes]:
        """Those of the piece's tokens, in the first piece after those of the echoed prompt; empty without any."""
        own: dict[str, bytes] = {}
        if self.logprobs is not None and piece.token_ids:
            made = self.logprobs.of(piece.token_ids, piece.logprobs, texts, piece.text[piece.num_echoed_chars :])
            own = {name: encoded(values) for name, values in made.items()}
        if not piece.prompt_token_ids or not self.prompt.echoed:
            return own
        return {name: b",".join((echoed, own[name])) if own else echoed
                for name, echoed in self.prompt.echoed.items()}


def _logprobs(order: Order, num_chars: int = 0) -> CompletionLogprobs | None:
    if order.logprobs is None:
        return None
    return CompletionLogprobs(order.logprobs, skip_special_tokens=order.skip_special_tokens,
                              as_ids=order.return_tokens_as_token_ids, num_chars=num_chars)


def _lists(logprobs: Mapping[str, Sequence[bytes]]) -> dict[str, orjson.Fragment] | None:
    """Of each name one list of its parts; None without any."""
    return {name: json_list(*parts) for name, parts in logprobs.items()} or None


class CompletionChunks:
    """`gateway.responses.ChunkWriter`."""

    def __init__(self, order: Order, envelope: Envelope) -> None:
        self._order, self._envelope = order, envelope
        self._call_scores = CallScores(order)
        self._scores: dict[int, ChoiceScores] = {}
        self._is_plain = order.logprobs is None and not order.return_token_ids

    def begin(self, piece: Piece) -> bytes:
        self._envelope.begin(piece.fingerprint)
        return b""

    def content(self, piece: Piece, texts: Mapping[int, TokenText]) -> bytes:
        choice = b'{"index":%d' % piece.choice + _TEXT + orjson.dumps(piece.text)
        if self._is_plain:
            return self._envelope.chunk(choice + _TEXT_END, piece.usage) if piece.text else b""
        if piece.prompt_token_ids:
            self._scores[piece.choice] = self._call_scores.open(piece, texts)
        logprobs = self._scores[piece.choice].of(piece, texts)
        more: dict[str, Any] = {
            "logprobs": _lists({name: [part] for name, part in logprobs.items()}), "finish_reason": None}
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

    scores: ChoiceScores
    prompt_token_ids: tuple[int, ...]
    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, list[bytes]] = field(default_factory=dict)  # encoded, part by part
    token_ids: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)


class CompletionBody:
    """`gateway.responses.BodyWriter`."""

    def __init__(self, order: Order, envelope: Envelope) -> None:
        self._order, self._envelope = order, envelope
        self._call_scores = CallScores(order)
        self._choices: dict[int, _Whole] = {}

    def add(self, piece: Piece, texts: Mapping[int, TokenText]) -> None:
        choice = self._choices.get(piece.choice)
        if choice is None:
            choice = self._choices[piece.choice] = _Whole(
                self._call_scores.open(piece, texts), piece.prompt_token_ids)
        choice.texts.append(piece.text)
        choice.token_ids += piece.token_ids
        for name, part in choice.scores.of(piece, texts).items():
            choice.logprobs.setdefault(name, []).append(part)

    def finish(self, ending: Ending) -> None:
        self._choices[ending.choice].end = reasons(ending.finish_reason, ending.stop_reason)

    def body(self, last: Ending) -> bytes:
        return self._envelope.body(
            [self._choice(index, self._choices[index]) for index in sorted(self._choices)], last)

    def _choice(self, index: int, choice: _Whole) -> dict[str, Any]:
        body: dict[str, Any] = {
            "index": index, "text": "".join(choice.texts), "logprobs": _lists(choice.logprobs), **choice.end}
        if choice.scores.prompt.entries is not None:
            body["prompt_logprobs"] = choice.scores.prompt.entries
        if self._order.return_token_ids:
            body |= {"prompt_token_ids": choice.prompt_token_ids, "token_ids": choice.token_ids}
        return body
