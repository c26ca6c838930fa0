"""Python literals read as they come, and passed on as JSON.

A list or a tuple is an array, and so is any value in parentheses. Keys of a dict become texts, as `json.dumps` does it.
What is no literal is malformed, and so are bytes, sets, complex numbers and strings side by side.
"""

from __future__ import annotations

import json
import re

from gateway.output_formats.json_text import Emit
from gateway.output_formats.unread_text import Malformed, Reading, UnreadText

MAX_TOKEN_CHARS = 1024  # of a number, a constant or a name

_TOKEN = re.compile(r"[\w.+-]+")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"([-+]?)([0-9]+(?:_[0-9]+)*)?(\.(?:[0-9]+(?:_[0-9]+)*)?)?([eE][-+]?[0-9]+)?")
_BASED = re.compile(r"([-+]?)0([xX][0-9a-fA-F]+|[oO][0-7]+|[bB][01]+)")
_PLAIN = re.compile(r"[^\\'\"]+")
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL)
_PARTIAL_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{0,1}|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_OCTAL = re.compile(r"\\[0-7]{1,2}")
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "",
           "\\": "\\", "'": "'", '"': '"'}
_SURROGATE = re.compile("[\ud800-\udfff]")
_OPENERS = {"[": ("[", "]", "]"), "(": ("[", ")", "]"), "{": ("{", "}", "}")}  # JSON's opener; Python's and its closer


def convert_value(source: UnreadText, emit: Emit) -> Reading[None]:
    """Pass one value on. Raises `Malformed` at the first character that cannot go on."""
    closers: list[tuple[str, str]] = []  # of what is open, innermost last: Python's and JSON's
    while True:
        char = yield from source.peek()
        if char in _OPENERS:
            opener, *closer = _OPENERS[char]
            source.take(1)
            emit(opener)
            closers.append((closer[0], closer[1]))
            yield from source.space()
            if (yield from source.peek()) != closers[-1][0]:
                yield from _convert_key(source, emit, closers)
                continue
        elif char in "'\"":
            yield from _convert_string(source, emit)
        else:
            emit((yield from _scalar(source)))
        if not (yield from _convert_separators(source, emit, closers)):
            return


def _convert_separators(source: UnreadText, emit: Emit, closers: list[tuple[str, str]]) -> Reading[bool]:
    """Between a value and the next one. False: there is no next one."""
    while closers:
        yield from source.space()
        if (yield from source.takes(",")):
            yield from source.space()
            if (yield from source.peek()) != closers[-1][0]:
                emit(", ")
                yield from _convert_key(source, emit, closers)
                return True
        yield from source.expects(closers[-1][0])
        emit(closers.pop()[1])
    return False


def _convert_key(source: UnreadText, emit: Emit, closers: list[tuple[str, str]]) -> Reading[None]:
    """In a dict: a key with its colon."""
    if closers[-1][0] != "}":
        return
    if (yield from source.peek()) in "'\"":
        yield from _convert_string(source, emit)
    else:
        emit(f'"{(yield from _scalar(source))}"')
    yield from source.space()
    yield from source.expects(":")
    emit(": ")
    yield from source.space()


def _scalar(source: UnreadText) -> Reading[str]:
    """Takes a number or a constant. Raises `Malformed` for anything else, and leaves it."""
    token = yield from source.token(_TOKEN, MAX_TOKEN_CHARS)
    written = _written(token)
    if written is None:
        raise Malformed
    source.take(len(token))
    return written


def _written(token: str) -> str | None:
    """A number or a constant in JSON; None: it is neither."""
    if token in _CONSTANTS:
        return _CONSTANTS[token]
    if based := _BASED.fullmatch(token):
        return f"{'-' if based[1] == '-' else ''}{int('0' + based[2], 0)}"
    number = _NUMBER.fullmatch(token)
    if number is None or not (number[2] or (number[3] or ".") != "."):
        return None
    sign, whole, fraction, exponent = (part or "" for part in number.groups())
    whole = whole.replace("_", "").lstrip("0") or "0"
    fraction = f"{fraction}0" if fraction == "." else fraction.replace("_", "")
    return f"{sign.strip('+')}{whole}{fraction}{exponent}"


def _convert_string(source: UnreadText, emit: Emit) -> Reading[None]:
    quote = yield from source.peek()
    if (yield from source.takes(quote * 3)):
        quote *= 3
    else:
        source.take(1)
    emit('"')
    while not (yield from source.takes(quote)):
        char = yield from source.peek()
        if char == "\\":
            emit(_escaped((yield from _escape(source))))
        else:
            plain = source.here(_PLAIN)
            emit(_quoted(source.take(len(plain) or 1)))
    emit('"')


def _escape(source: UnreadText) -> Reading[str]:
    """Takes one escape."""
    while True:
        escape = source.here(_ESCAPE)
        is_open = len(escape) == source.num_here and _OCTAL.fullmatch(escape) is not None
        if escape and (source.is_whole or not is_open):
            return source.take(len(escape))
        if source.is_whole or (not escape and len(source.here(_PARTIAL_ESCAPE)) < source.num_here):
            raise Malformed
        yield


def _escaped(escape: str) -> str:
    """An escape of Python as JSON writes it. One that Python does not know stands for itself."""
    kind = escape[1]
    if kind == "u":
        return escape  # also half of a pair
    if kind in "xU":
        return _quoted(chr(int(escape[2:], 16)))
    if kind in "01234567":
        return _quoted(chr(int(escape[1:], 8)))
    return _quoted(_SIMPLE.get(kind, escape))


def _quoted(text: str) -> str:
    """As a part of a JSON string; surrogates as escapes, which alone can be sent."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    return written if written.isascii() or not _SURROGATE.search(written) else json.dumps(text)[1:-1]
