"""Texts and sets of characters of EBNF: their escapes, and a set as a regex in Rust's syntax."""

from __future__ import annotations

import re

from common.errors import InvalidRequest

_PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0"}
_ITSELF = frozenset('\\"\'[]^-/.')
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ANY = "(?s:.)"


def text_of(escaped: str) -> str:
    """What stands between the quotes, its escapes read. Raises `InvalidRequest` for one that is not known."""
    return "".join(char for char, _ in _chars(escaped))


def chars_of(written: str) -> str:
    """The regex of one character out of `[…]`, `[^…]` or `.`. Raises `InvalidRequest` for an empty set."""
    if written == ".":
        return _ANY
    body = written[1:-1]
    is_negated = body.startswith("^")
    chars = _chars(body.removeprefix("^"))
    if not chars:
        raise InvalidRequest(f"{written!r} is an empty set of characters")
    ranges, at = [], 0
    while at < len(chars):
        first, last = chars[at][0], chars[at][0]
        if chars[at + 1 : at + 2] == [("-", False)] and at + 2 < len(chars):
            last = chars[at + 2][0]
            at += 2
        if last < first:
            raise InvalidRequest(f"the range {first!r} to {last!r} is empty")
        ranges.append(f"\\x{{{ord(first):X}}}" + (f"-\\x{{{ord(last):X}}}" if last != first else ""))
        at += 1
    return f"[{'^' if is_negated else ''}{''.join(ranges)}]"


def _chars(escaped: str) -> list[tuple[str, bool]]:
    """Characters, and whether each was escaped."""
    chars: list[tuple[str, bool]] = []
    at = 0
    while at < len(escaped):
        if escaped[at] != "\\":
            chars.append((escaped[at], False))
            at += 1
            continue
        kind = escaped[at + 1]
        num_digits = _HEX_DIGITS.get(kind, 0)
        digits = escaped[at + 2 : at + 2 + num_digits]
        chars.append((_escaped(kind, digits, num_digits), True))
        at += 2 + num_digits
    return chars


def _escaped(kind: str, digits: str, num_digits: int) -> str:
    if kind in _PLAIN_ESCAPES:
        return _PLAIN_ESCAPES[kind]
    if kind in _ITSELF:
        return kind
    if num_digits and re.fullmatch(rf"[0-9A-Fa-f]{{{num_digits}}}", digits):
        code = int(digits, 16)
        if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            return chr(code)
        raise InvalidRequest(f"the escape '\\{kind}{digits}' is no character")
    raise InvalidRequest(f"the escape '\\{kind}{digits}' is not known")
