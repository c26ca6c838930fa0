"""The text of one choice as a tool-call format reads it: where each character goes.

    CONTENT ──begin──▶ HELD ──announce, of a known tool──▶ CALL ──end_arguments──▶ HELD ──resume_arguments──▶ CALL
       ▲                │ ╰───announce, of any other────▶ REFUSED ──begin──▶ HELD
       ╰────release─────╯

CONTENT and REFUSED: what is read is content. HELD: it is content if the format is broken before `announce` or
`commit`, else it was syntax. CALL: it is the format's to say what of it are arguments. So no text is ever lost: a call
that turns out broken after it was announced keeps the arguments that it has, and the text from there on is content.

White space beside a call is part of the format: it is content only together with other content after it, or where
there is no call at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from gateway.output_formats.unread_text import SPACE, Reading, UnreadText
from gateway.parsed import ContentDelta, ParsedDelta, ToolCallArguments, ToolCallStart


class _Mode(Enum):
    CONTENT = auto()
    HELD = auto()
    CALL = auto()
    REFUSED = auto()


class CallText(UnreadText):
    """Calls of tools not in `names` are content.

    With `one_at_most`, calls after the first are left out: they come neither as calls nor as content.
    """

    def __init__(self, names: Iterable[str], *, one_at_most: bool) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._one_at_most = one_at_most
        self._mode = _Mode.CONTENT
        self._held: list[str] = []
        self._space: list[str] = []  # at the end of the content so far
        self._num_calls = 0
        self._deltas: list[ParsedDelta] = []
        self._texts: list[str] = []  # of the delta in the making: content, or arguments of the last call
        self._texts_are_arguments = False

    def deltas(self) -> list[ParsedDelta]:
        """What the text read since the last time has come to."""
        if self._is_whole and not self._num_calls:
            self._write_space()
        self._close_delta()
        deltas, self._deltas = self._deltas, []
        return deltas

    def taken(self, text: str) -> None:
        if self._mode is _Mode.HELD:
            self._held.append(text)
        elif self._mode is not _Mode.CALL:
            self._content(text)

    def content_until(self, *markers: str) -> Reading[str]:
        """Read content up to one of `markers`, and return it; empty at the end. It is left unread."""
        while True:
            num_chars, marker = self.before(*markers)
            if num_chars:
                self.take(num_chars)
            if marker or self.is_at_end:
                return marker
            yield

    def begin(self) -> None:
        """What follows may be a call."""
        self._mode = _Mode.HELD

    def announce(self, name: str) -> None:
        """A call of `name`; its arguments follow."""
        if self._mode is not _Mode.HELD:
            return
        if name not in self._names:
            self.release()
            self._mode = _Mode.REFUSED
            return
        self._held.clear()
        self._space.clear()
        self._mode = _Mode.CALL
        self._close_delta()
        self._num_calls += 1
        if not self._is_left_out:
            self._deltas.append(ToolCallStart(self._num_calls - 1, name))

    def knows(self, name: str) -> bool:
        return name in self._names

    def arguments(self, text: str) -> None:
        """More of the announced call's arguments."""
        if self._mode is _Mode.CALL and not self._is_left_out:
            self._write(text, is_arguments=True)

    def end_arguments(self) -> None:
        if self._mode is _Mode.CALL:
            self._mode = _Mode.HELD

    def resume_arguments(self) -> None:
        """What was held since the last arguments was syntax; more of the same call's follow."""
        if self._mode is _Mode.HELD:
            self._held.clear()
            self._mode = _Mode.CALL

    def commit(self) -> None:
        """What is held was syntax."""
        self._held.clear()

    def release(self) -> None:
        """What is held is content, and what follows."""
        held, self._mode = self._held, _Mode.CONTENT
        self._held = []
        for text in held:
            self._content(text)

    @property
    def _is_left_out(self) -> bool:
        return self._one_at_most and self._num_calls > 1

    def _content(self, text: str) -> None:
        bare = text.rstrip(SPACE)
        if bare:
            self._write_space()
            self._write(bare, is_arguments=False)
        self._space.append(text[len(bare) :])

    def _write_space(self) -> None:
        self._write("".join(self._space), is_arguments=False)
        self._space.clear()

    def _write(self, text: str, *, is_arguments: bool) -> None:
        if is_arguments is not self._texts_are_arguments:
            self._close_delta()
            self._texts_are_arguments = is_arguments
        self._texts.append(text)

    def _close_delta(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self._deltas.append(
                ToolCallArguments(self._num_calls - 1, text) if self._texts_are_arguments else ContentDelta(text))
