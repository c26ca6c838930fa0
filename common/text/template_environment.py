"""The sandbox that chat templates run in: Jinja as Hugging Face templates expect it, plus bounds on size and time."""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class Refusal(TemplateError):
    """The template called `raise_exception(message)`."""


class BoundExceeded(TemplateError):
    """Rendering took too long or gave too much text; the message says which and the limit."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Templates see plain values, filters and the four globals below; nothing they touch can be changed."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        self._clock = threading.local()  # one render per thread at a time
        self.filters["tojson"] = _tojson
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_PlainNamespace)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        self._check_time()
        return super().call(__context, __obj, *args, **kwargs)

    def check_time(self) -> bool:
        """Called in each round of each loop: the sandbox bounds a range, but not loops in loops."""
        return True  # `call` has looked at the clock

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in list(source.find_all(nodes.For)):
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(check).set_lineno(loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(check, loop.test).set_lineno(loop.lineno)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def render(self, template: Template, variables: dict[str, Any], max_chars: int, timeout_s: float) -> str:
        """The rendered text. Raises `BoundExceeded`; time is checked at each output, call and round of a loop."""
        self._clock.limit_s, self._clock.deadline = timeout_s, time.monotonic() + timeout_s
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            self._check_time()
            num_chars += len(piece)
            if num_chars > max_chars:
                raise BoundExceeded(f"the rendered conversation is longer than {max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)

    def _check_time(self) -> None:
        if time.monotonic() > getattr(self._clock, "deadline", float("inf")):
            raise BoundExceeded(f"rendering the chat template took longer than {self._clock.limit_s:g} s")


class _GenerationBlock(Extension):
    """`{% generation %} … {% endgeneration %}` marks assistant text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012  # the base class's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(Namespace):
    """Jinja's namespace without underscore names, so that no interpreter internals can be reached through it."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the underscore name {name!r}")


def _raise_exception(message: str) -> None:
    raise Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
