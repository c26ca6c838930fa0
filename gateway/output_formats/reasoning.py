"""Reasoning comes first and between two tags, <think>…</think> or [THINK]…[/THINK]; another parser reads the rest.

    OPENING ──the tag, or the prompt has opened it──▶ REASONING ──closing tag──▶ REST
       └──anything else──▶ REST

Line ends that begin or end the reasoning, and those after its closing tag, belong to the tags, as the models' own
templates have it.
"""

from __future__ import annotations

import re

from gateway.output_formats.unread_text import Reading, UnreadText
from gateway.parsed import OutputParser, ParsedDelta, ReasoningDelta

_LINE_ENDS = re.compile(r"[\r\n]+")
_LINE_END_CHARS = "\r\n"


class ReasoningParser:
    """`begins_inside`: the prompt ends with the opening tag (which the model may repeat)."""

    def __init__(self, open_tag: str, close_tag: str, rest: OutputParser, *, begins_inside: bool) -> None:
        self._open_tag, self._close_tag, self._rest = open_tag, close_tag, rest
        self._begins_inside = begins_inside
        self._unread = UnreadText()
        self._deltas: list[ParsedDelta] = []
        self._reading: Reading[None] | None = self._read()

    def push(self, text: str) -> list[ParsedDelta]:
        if self._reading is None:
            return self._rest.push(text)
        self._unread.add(text)
        self._go_on()
        return self._taken_deltas()

    def finish(self) -> list[ParsedDelta]:
        if self._reading is not None:
            self._unread.end()
            self._go_on()
        return [*self._taken_deltas(), *self._rest.finish()]

    def _go_on(self) -> None:
        assert self._reading is not None
        if next(self._reading, _ENDED) is _ENDED:
            self._reading = None

    def _taken_deltas(self) -> list[ParsedDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> Reading[None]:
        unread = self._unread
        space = yield from unread.space()
        if not (yield from unread.takes(self._open_tag)):
            if not self._begins_inside:
                self._deltas += self._rest.push(space + unread.take(unread.num_here))
                return
            self._write(space.lstrip(_LINE_END_CHARS))
        yield from unread.takes_run(_LINE_ENDS)
        yield from self._read_reasoning()
        if (yield from unread.takes(self._close_tag)):
            yield from unread.takes_run(_LINE_ENDS)
            self._deltas += self._rest.push(unread.take(unread.num_here))

    def _read_reasoning(self) -> Reading[None]:
        """Up to the closing tag, or all that comes."""
        unread, line_ends = self._unread, list[str]()
        while True:
            num_chars, tag = unread.before(self._close_tag)
            text = unread.take(num_chars)
            bare = text.rstrip(_LINE_END_CHARS)
            if bare:
                self._write("".join(line_ends) + bare)
                line_ends.clear()
            line_ends.append(text[len(bare) :])
            if tag or unread.is_at_end:
                return
            yield

    def _write(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))


_ENDED = object()
