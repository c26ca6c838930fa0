"""Reads the output of one choice by a tool-call format: an `OutputParser`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.output_formats.call_text import CallText
from gateway.output_formats.unread_text import Reading
from gateway.parsed import ContentDelta, ParsedDelta

CallFormat = Callable[[CallText], Reading[None]]


class CallParser:
    """States: open → finished. Its work is linear in the text."""

    def __init__(self, read: CallFormat, names: Sequence[str], *, one_at_most: bool) -> None:
        self._text = CallText(names, one_at_most=one_at_most)
        self._reading = _to_the_end(read, self._text)

    def push(self, text: str) -> list[ParsedDelta]:
        self._text.add(text)
        next(self._reading, None)
        return self._text.deltas()

    def finish(self) -> list[ParsedDelta]:
        self._text.end()
        return self.push("")


class ContentParser:
    """It is all content."""

    def push(self, text: str) -> list[ParsedDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ParsedDelta]:
        return []


def _to_the_end(read: CallFormat, text: CallText) -> Reading[None]:
    yield from read(text)
    yield from text.content_until()
