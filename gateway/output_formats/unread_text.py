"""Text that comes in pieces, read by a generator that yields whenever it needs the next piece.

What a reader asks depends on the text alone and never on where the pieces end: a question that the unread text cannot
answer yet waits. What waits is bounded by what is asked for, so reading is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields: more text is needed; the driver adds some, or says that it was the last

SPACE = " \t\r\n"
_SPACE = re.compile(f"[{SPACE}]+")


class Malformed(Exception):
    """The unread text is not what the format has here. It stays unread; never leaves a reader."""


class UnreadText:
    """The front of the text that is not read yet. A subclass may want to know what is taken."""

    def __init__(self) -> None:
        self._text, self._at = "", 0
        self._is_whole = False

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self) -> None:
        """No more text."""
        self._is_whole = True

    def taken(self, text: str) -> None:
        """Called for all text in order, as it is read."""

    @property
    def num_here(self) -> int:
        """Unread characters that have come."""
        return len(self._text) - self._at

    @property
    def is_at_end(self) -> bool:
        """Nothing is left, nor will be."""
        return self._is_whole and self._at == len(self._text)

    @property
    def is_whole(self) -> bool:
        """All of the text is here."""
        return self._is_whole

    def take(self, num_chars: int) -> str:
        """That many characters that are known to be here."""
        text = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        self.taken(text)
        return text

    def more(self) -> Reading[bool]:
        """Whether any text is left."""
        while self._at == len(self._text):
            if self._is_whole:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character. Raises `Malformed` at the end."""
        if self._at == len(self._text) and not (yield from self.more()):
            raise Malformed
        return self._text[self._at]

    def looks_at(self, marker: str) -> Reading[bool]:
        """Whether `marker` is next."""
        while (here := self._text[self._at : self._at + len(marker)]) != marker:
            if self._is_whole or not marker.startswith(here):
                return False
            yield
        return True

    def takes(self, marker: str) -> Reading[bool]:
        """As `looks_at`; takes the marker if it is there."""
        is_there = yield from self.looks_at(marker)
        if is_there:
            self.take(len(marker))
        return is_there

    def expects(self, marker: str) -> Reading[None]:
        """Take `marker`. Raises `Malformed` if it is not there."""
        if not (yield from self.takes(marker)):
            raise Malformed

    def here(self, run: re.Pattern[str]) -> str:
        """What matches `run` of the text that is here; not taken."""
        match = run.match(self._text, self._at)
        return match[0] if match else ""

    def takes_run(self, run: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """Take what matches `run`, a repeated class of characters. Raises `Malformed` after `limit` characters."""
        taken: list[str] = []
        left = limit
        while (yield from self.more()):
            text = self.here(run)
            if left is not None:
                if len(text) > left:
                    self.take(left)
                    raise Malformed
                left -= len(text)
            taken.append(self.take(len(text)))
            if self._at < len(self._text):
                break
        return "".join(taken)

    def space(self) -> Reading[str]:
        """Take white space, if there is any."""
        return (yield from self.takes_run(_SPACE))

    def token(self, run: re.Pattern[str], limit: int) -> Reading[str]:
        """The whole of what matches `run`, left unread. Raises `Malformed` beyond `limit` characters.

        Unlike a run that is taken, it is looked at again with each piece; hence the limit.
        """
        while True:
            text = self.here(run)
            if len(text) > limit:
                raise Malformed
            if self._is_whole or self._at + len(text) < len(self._text):
                return text
            yield

    def before(self, *markers: str) -> tuple[int, str]:
        """How many characters that are here come surely before any of `markers`, and the one that follows them.

        Empty: none is here. At the end of the text there is nothing to wait for: all of it counts.
        """
        found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
        if found:
            at, marker = min(found)
            return at - self._at, marker
        end = len(self._text)
        if not self._is_whole:
            for marker in markers:
                end = min(end, _start_of_partial(marker, self._text, self._at))
        return end - self._at, ""


def _start_of_partial(marker: str, text: str, at: int) -> int:
    """Where a beginning of `marker` starts with which `text` ends; its length if it ends with none."""
    start = max(at, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return start
        start += 1
    return len(text)
