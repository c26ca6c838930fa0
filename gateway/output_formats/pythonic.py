"""Llama 4, LFM2 and others: a list of calls as Python writes them, [f(a=1, b="x"), g()].

The list starts the output, or comes anywhere in it between the markers of one of the models that have some. Arguments
are passed on as JSON.
"""

from __future__ import annotations

import json
import re

from gateway.output_formats.call_text import CallText
from gateway.output_formats.python_text import MAX_TOKEN_CHARS, convert_value
from gateway.output_formats.unread_text import Malformed, Reading

MARKERS = {"<|python_start|>": "<|python_end|>", "<|tool_call_start|>": "<|tool_call_end|>"}

_NAME = re.compile(r"[\w.-]+")
_KEYWORD = re.compile(r"\w+")


def read_pythonic(text: CallText) -> Reading[None]:
    text.begin()
    yield from text.space()
    if (yield from text.looks_at("[")):
        yield from _read_list(text, "")
    text.release()
    while marker := (yield from text.content_until(*MARKERS)):
        text.begin()
        text.take(len(marker))
        yield from text.space()
        yield from _read_list(text, MARKERS[marker])


def _read_list(text: CallText, end_marker: str) -> Reading[None]:
    try:
        yield from text.expects("[")
        while True:
            yield from text.space()
            yield from _read_call(text)
            yield from text.space()
            if not (yield from text.takes(",")):
                break
        yield from text.expects("]")
        text.commit()
        if end_marker:
            yield from text.space()
            yield from text.expects(end_marker)
            text.commit()
    except Malformed:
        pass
    text.release()


def _read_call(text: CallText) -> Reading[None]:
    text.begin()
    name = yield from text.takes_run(_NAME, MAX_TOKEN_CHARS)
    yield from text.space()
    yield from text.expects("(")
    yield from text.space()
    has_arguments = False
    while not (yield from text.looks_at(")")):
        keyword = yield from text.takes_run(_KEYWORD, MAX_TOKEN_CHARS)
        yield from text.space()
        yield from text.expects("=")
        if has_arguments:
            text.resume_arguments()
        else:
            text.announce(name)
        text.arguments(f"{', ' if has_arguments else '{'}{json.dumps(keyword, ensure_ascii=False)}: ")
        has_arguments = True
        yield from text.space()
        yield from convert_value(text, text.arguments)
        text.end_arguments()
        yield from text.space()
        if not (yield from text.takes(",")):
            break
        yield from text.space()
    yield from text.expects(")")
    if has_arguments:
        text.resume_arguments()
    else:
        text.announce(name)
    text.arguments("}" if has_arguments else "{}")
    text.end_arguments()
