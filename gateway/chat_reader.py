"""Reads the output of one choice of a chat: what is content, what is reasoning, what calls a tool."""

from __future__ import annotations

from common.generation import FinishReason
from gateway.order import Piece
from gateway.parsed import ContentDelta, OutputParser, ParsedDelta, ReasoningDelta, ToolCallStart


class ChatReader:
    """`read` each piece, then `finish` once. Without a parser all text is content.

    A token counts as reasoning when its text does; of a piece that is partly reasoning, as large a part of its tokens
    as of its characters. Tokens whose text the parser keeps to itself count with what comes next.
    """

    def __init__(self, parser: OutputParser | None, *, show_reasoning: bool = True) -> None:
        self._parser, self._show_reasoning = parser, show_reasoning
        self._num_unread_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        return self._parser is None

    def read(self, piece: Piece) -> list[ParsedDelta]:
        if self._parser is None:
            return [ContentDelta(piece.text)] if piece.text else []
        self._num_unread_tokens += len(piece.token_ids)
        return self._noted(self._parser.push(piece.text)) if piece.text else []

    def finish(self) -> list[ParsedDelta]:
        """No more text: what the parser has held back."""
        return [] if self._parser is None else self._noted(self._parser.finish())

    def finish_reason(self, reason: FinishReason) -> str:
        """A model that stopped after it called tools waits for their results."""
        return "tool_calls" if self.num_calls and reason is FinishReason.STOP else reason

    def _noted(self, deltas: list[ParsedDelta]) -> list[ParsedDelta]:
        if not deltas:
            return deltas
        num_chars = num_reasoning = 0
        for delta in deltas:
            num_chars += len(delta.name if isinstance(delta, ToolCallStart) else delta.text)
            if isinstance(delta, ReasoningDelta):
                num_reasoning += len(delta.text)
            elif isinstance(delta, ToolCallStart):
                self.num_calls += 1
        if num_chars:
            self.num_reasoning_tokens += round(self._num_unread_tokens * num_reasoning / num_chars)
            self._num_unread_tokens = 0
        return deltas if self._show_reasoning else [d for d in deltas if not isinstance(d, ReasoningDelta)]


