"""DeepSeek, its calls between the markers of a list. A call of V3 and R1, and the same of V3.1:

<｜tool▁call▁begin｜>function<｜tool▁sep｜>name⏎```json⏎{…}⏎```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re

from gateway.output_formats.call_text import CallText
from gateway.output_formats.json_call import read_arguments
from gateway.output_formats.unread_text import Malformed, Reading

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIND, FENCE, FENCE_END = "function", "```json", "```"
MAX_NAME_CHARS = 1024
_WORD = re.compile(r"[^<]+")
_LINE = re.compile(r"[^\n]+")


def read_deepseek(text: CallText) -> Reading[None]:
    while (yield from text.content_until(CALLS)):
        text.begin()
        text.take(len(CALLS))
        try:
            while True:
                yield from text.space()
                text.begin()
                yield from text.expects(CALL)
                yield from _read_call(text)
                yield from text.space()
                if (yield from text.takes(CALLS_END)):
                    text.commit()
                    break
        except Malformed:
            pass
        text.release()


def _read_call(text: CallText) -> Reading[None]:
    word = (yield from text.takes_run(_WORD, MAX_NAME_CHARS)).strip()
    yield from text.expects(SEPARATOR)
    yield from text.space()
    is_fenced = word == KIND and not (yield from text.looks_at("{"))
    if is_fenced:
        word = (yield from text.takes_run(_LINE, MAX_NAME_CHARS)).strip()
        yield from text.space()
        yield from text.expects(FENCE)
        yield from text.space()
    yield from read_arguments(text, word)
    yield from text.space()
    if is_fenced:
        yield from text.expects(FENCE_END)
        yield from text.space()
    yield from text.expects(CALL_END)
    text.commit()
