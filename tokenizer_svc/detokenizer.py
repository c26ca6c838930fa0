"""Text of running generations, for the gateways whose streams are open.

A `Session` is one gateway stream; it holds one `OutputText` per stream id. States of a stream id: absent → open (first
item, with `opening`) → absent (flush, close, a stop string, an error, or the end of the session). Every item is
answered in order, but one that only closes. All sessions share one bound on open stream ids. A stream that was opened
with a turn and finishes leaves its ids in the model's segment cache (tokenizer_svc/segment_cache.py has the rule).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from common.errors import InvalidRequest, NotFound, Overloaded, ShoalError
from common.metrics import gauge
from common.text.output_text import OutputText
from common.tokenized import TextDelta
from tokenizer_svc.encoder import DECODED, REFUSED
from tokenizer_svc.segment_cache import SegmentCache
from tokenizer_svc.served_models import ServedModels
from tokenizer_svc.turn import Turn

STREAMS = gauge("shoal_tokenizer_text_streams", "choices being detokenized")


@dataclass(frozen=True, slots=True)
class Opening:
    """How a stream's text is made."""

    model: str
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    turn: bytes = b""  # of the prompt that is answered; empty: the ids are not remembered


@dataclass(frozen=True, slots=True)
class Item:
    """What one stream brings in one batch."""

    stream_id: int
    token_ids: Sequence[int] = ()
    opening: Opening | None = None
    flush: bool = False
    close: bool = False


Answer = tuple[int, TextDelta | ShoalError]  # (stream_id, ...)


@dataclass(slots=True)
class _Stream:
    text: OutputText
    decoded: Counter  # the model's
    segments: SegmentCache
    turn: Turn | None
    drawn: array[int] = field(default_factory=lambda: array("I"))  # only with a turn
    num_chars: int = 0  # given out

    def push(self, token_ids: Sequence[int], *, flush: bool) -> TextDelta:
        delta = self.text.push(token_ids)
        self.decoded.inc(len(token_ids))
        if flush and not delta.finished:
            tail = self.text.finish()
            delta = TextDelta(delta.text + tail.text, tail.num_tokens, tail.matched_stop, finished=True)
        self.num_chars += len(delta.text)
        if self.turn is not None:
            self.drawn.extend(token_ids)
            if delta.finished:
                self.segments.remember(self.turn, self.drawn[: delta.num_tokens], self.num_chars)
        return delta


class Detokenizer:
    """Opens sessions; counts their streams."""

    def __init__(self, models: ServedModels, max_streams: int) -> None:
        self.models, self.max_streams = models, max_streams
        self.num_streams = 0

    def open_session(self) -> Session:
        return Session(self)

    def count(self, change: int) -> None:
        self.num_streams += change
        STREAMS.set(self.num_streams)


class Session:
    """The streams of one gateway. Not for several threads at once."""

    def __init__(self, owner: Detokenizer) -> None:
        self._owner = owner
        self._texts: dict[int, _Stream] = {}

    def step(self, items: Sequence[Item]) -> list[Answer]:
        """Answers in the order of the items; a fault of one item is its own answer."""
        answers: list[Answer] = []
        for item in items:
            if item.close:
                self._forget(item.stream_id)
                continue
            try:
                answers.append((item.stream_id, self._advance(item)))
            except ShoalError as error:
                self._forget(item.stream_id)
                answers.append((item.stream_id, error))
        return answers

    def close(self) -> None:
        """Forget all streams."""
        self._owner.count(-len(self._texts))
        self._texts.clear()

    def _advance(self, item: Item) -> TextDelta:
        if item.opening is not None:
            self._open(item.stream_id, item.opening)
        if item.stream_id not in self._texts:
            raise NotFound(f"stream_id: {item.stream_id} is not open", param="stream_id")
        delta = self._texts[item.stream_id].push(item.token_ids, flush=item.flush)
        if delta.finished:
            self._forget(item.stream_id)
        return delta

    def _open(self, stream_id: int, opening: Opening) -> None:
        if stream_id in self._texts:
            raise InvalidRequest(f"stream_id: {stream_id} is open already", param="stream_id")
        if self._owner.num_streams >= self._owner.max_streams:
            REFUSED.labels("streams").inc()
            raise Overloaded(f"tokenizer: {self._owner.max_streams} texts are open already", retry_after_s=1.0)
        model = self._owner.models.get(opening.model)
        text = OutputText(model.tokenizer, stop=opening.stop, include_stop=opening.include_stop,
                          skip_special_tokens=opening.skip_special_tokens)
        turn = Turn.from_wire(opening.turn) if opening.turn else None
        self._texts[stream_id] = _Stream(text, DECODED.labels(model.name), model.segments, turn)
        self._owner.count(1)

    def _forget(self, stream_id: int) -> None:
        if self._texts.pop(stream_id, None) is not None:
            self._owner.count(-1)
