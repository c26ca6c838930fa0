"""Stop strings over a stream of text.

States: open → (feed)* → matched, or → finished (by `finish`). The first stop string to be complete ends the text, by
the position of its last character; of several that end there, the one that begins first. So the outcome depends
on the text alone, not on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from common.errors import InvalidRequest

MAX_STOPS: Final = 64
MAX_STOP_CHARS: Final = 1024


@dataclass(slots=True)
class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton. `length` characters of it are the text's current suffix."""

    stop: str
    fallback: list[int]  # length -> next shorter prefix that is also a suffix
    length: int = 0

    def advance(self, char: str) -> bool:
        """Take one character; true when the stop string is complete."""
        length = self.length
        while length and self.stop[length] != char:
            length = self.fallback[length]
        self.length = length + (self.stop[length] == char)
        return self.length == len(self.stop)


class StopMatcher:
    """Holds back the longest suffix that could begin a stop string: less than the longest of them."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Raises `InvalidRequest` for an empty stop string, one too long, or too many."""
        if len(stops) > MAX_STOPS:
            raise InvalidRequest(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise InvalidRequest(
                    f"stop: each string must have 1 to {MAX_STOP_CHARS} characters, got {len(stop)}", param="stop")
        self._patterns = [_Pattern(stop, _fallback(stop)) for stop in dict.fromkeys(stops)]
        self._first_chars = {stop[0] for stop in stops}
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is now certain. After a match (`matched` is set) all that was fed later is dropped."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_chars.isdisjoint(text):
            return text
        begin = len(self._held)
        text = self._held + text
        for index in range(begin, len(text)):
            complete = [p.stop for p in self._patterns if p.advance(text[index])]
            if complete:
                return self._end_at(text[: index + 1], max(complete, key=len))
        keep = max(p.length for p in self._patterns)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Release what was held back; no stop string came."""
        held, self._held = self._held, ""
        return held

    def _end_at(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]


def _fallback(stop: str) -> list[int]:
    table = [0] * (len(stop) + 1)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length]
        length += stop[index] == stop[length]
        table[index + 1] = length
    return table
