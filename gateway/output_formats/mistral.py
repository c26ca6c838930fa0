"""Mistral: [TOOL_CALLS] [{"name": …, "arguments": {…}}, …], or for each call [TOOL_CALLS]name[ARGS]{…}.

The latter since its 11th tokenizer; some versions write [CALL_ID]id after the name.
"""

from __future__ import annotations

import re

from gateway.output_formats.call_text import CallText
from gateway.output_formats.json_call import read_arguments, read_calls
from gateway.output_formats.unread_text import Malformed, Reading

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_NAME_CHARS = 1024
_NAME = re.compile(r"[^\[{]+")


def read_mistral(text: CallText) -> Reading[None]:
    while (yield from text.content_until(CALLS)):
        text.begin()
        text.take(len(CALLS))
        try:
            yield from text.space()
            if (yield from text.looks_at("[")):
                yield from read_calls(text)
            else:
                yield from _read_named(text)
        except Malformed:
            pass
        text.release()


def _read_named(text: CallText) -> Reading[None]:
    name = yield from text.takes_run(_NAME, MAX_NAME_CHARS)
    if (yield from text.takes(CALL_ID)):
        yield from text.takes_run(_NAME, MAX_NAME_CHARS)
    yield from text.takes(ARGS)
    yield from text.space()
    yield from read_arguments(text, name.strip())
