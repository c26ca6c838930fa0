"""Llama 3: {"name": …, "parameters": {…}}, several separated by `;`.

Calls start the output, or come after <|python_tag|> anywhere in it.
"""

from __future__ import annotations

from gateway.output_formats.call_text import CallText
from gateway.output_formats.json_call import read_call
from gateway.output_formats.unread_text import Malformed, Reading

TAG = "<|python_tag|>"


def read_llama3_json(text: CallText) -> Reading[None]:
    text.begin()
    yield from text.space()
    if (yield from text.looks_at("{")):
        yield from _read_calls(text)
    text.release()
    while (yield from text.content_until(TAG)):
        text.begin()
        text.take(len(TAG))
        yield from _read_calls(text)


def _read_calls(text: CallText) -> Reading[None]:
    try:
        while True:
            yield from text.space()
            yield from read_call(text)
            yield from text.space()
            yield from text.expects(";")
    except Malformed:
        text.release()
