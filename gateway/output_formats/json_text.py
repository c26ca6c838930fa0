"""JSON read as it comes: checked character by character, and passed on as it was written.

One thing is put right: control characters inside strings, which models write and JSON forbids, become escapes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from gateway.output_formats.unread_text import Malformed, Reading, UnreadText

Emit = Callable[[str], object]

MAX_SCALAR_CHARS = 1024  # of a number

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_VALID_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r'\\["\\/bfnrt]|\\u[0-9a-fA-F]{4}')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")


def copy_value(source: UnreadText, emit: Emit) -> Reading[None]:
    """Pass one value on. Raises `Malformed` at the first character that cannot go on; all before it was passed on."""
    closers: list[str] = []  # of what is open, innermost last
    while True:
        char = yield from source.peek()
        if char in "{[":
            emit(source.take(1))
            closers.append("}" if char == "{" else "]")
            yield from _copy_space(source, emit)
            is_empty = (yield from source.peek()) == closers[-1]
            if not is_empty:
                yield from _copy_key(source, emit, closers)
                continue
        elif char == '"':
            yield from copy_string(source, emit)
        else:
            yield from _copy_scalar(source, emit)
        if not (yield from _copy_separators(source, emit, closers)):
            return


def copy_string(source: UnreadText, emit: Emit) -> Reading[None]:
    yield from _copy_mark(source, emit, '"')
    while True:
        char = yield from source.peek()
        if char == '"':
            emit(source.take(1))
            return
        if char == "\\":
            yield from _copy_escape(source, emit)
        elif char < " ":
            emit(json.dumps(source.take(1))[1:-1])
        else:
            emit(source.take(len(source.here(_PLAIN))))


def read_string(source: UnreadText) -> Reading[str]:
    """What a string says."""
    written: list[str] = []
    yield from copy_string(source, written.append)
    return str(json.loads("".join(written)))


def _copy_separators(source: UnreadText, emit: Emit, closers: list[str]) -> Reading[bool]:
    """What is between a value and the next one: the ends of what is open, or a comma. False: there is no next one."""
    while closers:
        yield from _copy_space(source, emit)
        char = yield from source.peek()
        if char == closers[-1]:
            emit(source.take(1))
            closers.pop()
        elif char == ",":
            emit(source.take(1))
            yield from _copy_space(source, emit)
            yield from _copy_key(source, emit, closers)
            return True
        else:
            raise Malformed
    return False


def _copy_key(source: UnreadText, emit: Emit, closers: list[str]) -> Reading[None]:
    """In an object: a key with its colon."""
    if closers[-1] == "}":
        yield from copy_string(source, emit)
        yield from _copy_space(source, emit)
        yield from _copy_mark(source, emit, ":")
        yield from _copy_space(source, emit)


def _copy_mark(source: UnreadText, emit: Emit, mark: str) -> Reading[None]:
    yield from source.expects(mark)
    emit(mark)


def _copy_space(source: UnreadText, emit: Emit) -> Reading[None]:
    emit((yield from source.space()))


def _copy_scalar(source: UnreadText, emit: Emit) -> Reading[None]:
    text = yield from source.token(_SCALAR, MAX_SCALAR_CHARS)
    if not _VALID_SCALAR.fullmatch(text) and not (text and len(text) == source.num_here):  # cut off by the end
        raise Malformed
    emit(source.take(len(text)))


def _copy_escape(source: UnreadText, emit: Emit) -> Reading[None]:
    while not (escape := source.here(_ESCAPE)):
        partial = source.here(_PARTIAL_ESCAPE)
        if len(partial) < source.num_here:
            raise Malformed
        if source.is_whole:  # cut off by the end
            escape = partial
            break
        yield
    emit(source.take(len(escape)))
