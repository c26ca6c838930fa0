"""A call as a JSON object, or a JSON array of calls, that starts the output: what a forced call is written as."""

from __future__ import annotations

from gateway.output_formats.call_text import CallText
from gateway.output_formats.json_call import read_call, read_calls
from gateway.output_formats.unread_text import Malformed, Reading


def read_json(text: CallText) -> Reading[None]:
    text.begin()
    try:
        yield from text.space()
        if (yield from text.looks_at("[")):
            yield from read_calls(text)
        else:
            yield from read_call(text)
    except Malformed:
        pass
    text.release()
    yield from text.content_until()
