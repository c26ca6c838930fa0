"""Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, as often as there are calls."""

from __future__ import annotations

from gateway.output_formats.call_text import CallText
from gateway.output_formats.json_call import read_call
from gateway.output_formats.unread_text import Malformed, Reading

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read_hermes(text: CallText) -> Reading[None]:
    """The closing tag may be missing: some models stop, or go on, without it."""
    while (yield from text.content_until(OPEN)):
        text.begin()
        text.take(len(OPEN))
        try:
            yield from text.space()
            yield from read_call(text)
            yield from text.space()
            yield from text.expects(CLOSE)
            text.commit()
        except Malformed:
            pass
        text.release()
