"""What a chat's output text is made of, as it is read piece by piece: content, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins; calls of one choice are counted from 0. Its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


ParsedDelta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class OutputParser(Protocol):
    """Reads the output of one choice. Joined, the deltas are the same however the text was cut."""

    def push(self, text: str) -> list[ParsedDelta]: ...

    def finish(self) -> list[ParsedDelta]:
        """No more text: whatever was held back. What looked like a call and is none comes as content."""
