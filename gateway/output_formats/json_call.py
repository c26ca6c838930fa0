"""A call written as a JSON object: {"name": …, "arguments" or "parameters": {…}}, keys in any order."""

from __future__ import annotations

from gateway.output_formats.call_text import CallText
from gateway.output_formats.json_text import copy_value, read_string
from gateway.output_formats.unread_text import Malformed, Reading

_ARGUMENTS = ("arguments", "parameters")
_IGNORED = ("type", "id")  # models write these as the API does


def read_call(text: CallText) -> Reading[None]:
    """Raises `Malformed` at the first character that is not of a call. A call without arguments has `{}`."""
    text.begin()
    yield from text.expects("{")
    call = _Call(text)
    while True:
        yield from text.space()
        key = yield from read_string(text)
        yield from text.space()
        yield from text.expects(":")
        yield from text.space()
        yield from call.read(key)
        yield from text.space()
        if not (yield from text.takes(",")):
            break
    call.check()
    yield from text.expects("}")
    call.end()


def read_calls(text: CallText) -> Reading[None]:
    """A JSON array of calls, at least one. Raises `Malformed`."""
    text.begin()
    yield from text.expects("[")
    while True:
        yield from text.space()
        yield from read_call(text)
        yield from text.space()
        if not (yield from text.takes(",")):
            break
    yield from text.expects("]")
    text.commit()


def read_arguments(text: CallText, name: str) -> Reading[None]:
    """The arguments of a call of `name`, an object. Raises `Malformed`."""
    if not (yield from text.looks_at("{")):
        raise Malformed
    text.announce(name)
    yield from copy_value(text, text.arguments)
    text.end_arguments()


class _Call:
    """What is known of a call. Announced once its name is known and its arguments begin."""

    def __init__(self, text: CallText) -> None:
        self._text = text
        self._name: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._has_arguments = False

    def read(self, key: str) -> Reading[None]:
        if key == "name" and self._name is None:
            yield from self._read_name()
        elif key in _ARGUMENTS and not self._has_arguments:
            self._has_arguments = True
            if self._name is not None:
                yield from read_arguments(self._text, self._name)
            elif (yield from self._text.looks_at("{")):
                yield from copy_value(self._text, self._early.append)
            else:
                raise Malformed
        elif key in _IGNORED:
            yield from copy_value(self._text, lambda _: None)
        else:
            raise Malformed

    def check(self) -> None:
        """Raises `Malformed` for a call without a name."""
        if self._name is None:
            raise Malformed

    def end(self) -> None:
        assert self._name is not None
        if not self._has_arguments:
            self._announce("{}")
        self._text.commit()

    def _read_name(self) -> Reading[None]:
        self._name = yield from read_string(self._text)
        if self._early:
            self._announce("".join(self._early))
        elif not self._text.knows(self._name):
            self._text.announce(self._name)  # so that what follows goes out as the content that it is

    def _announce(self, arguments: str) -> None:
        assert self._name is not None
        self._text.announce(self._name)
        self._text.arguments(arguments)
        self._text.end_arguments()
