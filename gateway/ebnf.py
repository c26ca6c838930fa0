"""EBNF as llama.cpp, XGrammar and SGLang write it (`root ::= …`), to the grammar that an engine takes.

    rule   name ::= alternatives        the output is a `root`
    item   "text"   [a-z]   [^"]   .   name   ( … )   with * + ? {n} {n,} {n,m} behind it;   # begins a comment

EBNF reads character by character; llguidance's Lark first cuts the text into lexemes, and always takes the longest.
So what does not refer back to itself becomes one lexeme, however many rules it is made of. Where a rule does, a lexeme
before or after it never leaves out what EBNF would refuse, though it may take a character that was meant for the next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from common.errors import InvalidRequest
from gateway.ebnf_text import chars_of, text_of

MAX_EBNF_CHARS = 64 << 10
MAX_DEPTH = 64  # of open brackets
ROOT = "root"

_TOKEN = re.compile(r"""
    (?P<skip>\s+|\#[^\n]*)|(?P<define>::=)|(?P<name>[A-Za-z_][\w-]*)|(?P<text>"(?:[^"\\\n]|\\.)*")
    |(?P<chars>\[(?:[^\]\\\n]|\\.)*\]|\.)|(?P<repeat>[*+?]|\{\d{1,9}(?:,\d{0,9})?\})|(?P<mark>[()|])""",
    re.VERBOSE | re.ASCII)


@dataclass(frozen=True, slots=True)
class Text:
    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    regex: str


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class Repeat:
    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


Node = Text | Chars | Ref | Repeat | Sequence | Choice


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    line: int


def is_ebnf(text: str) -> bool:
    """Whether a grammar of unnamed dialect is EBNF: no other defines by `::=`."""
    return "::=" in text


def lark_of(text: str) -> str:
    """The grammar in llguidance's dialect of Lark. Raises `InvalidRequest` naming the line and the construct."""
    if len(text) > MAX_EBNF_CHARS:
        raise InvalidRequest(f"EBNF is too long: {len(text)} characters, the limit is {MAX_EBNF_CHARS}")
    rules = _Parser(list(_tokens(text))).rules()
    if ROOT not in rules:
        raise InvalidRequest(f"EBNF has no rule named {ROOT!r}, which the output would be")
    for name, body in rules.items():
        for ref in _refs(body):
            if ref not in rules:
                raise InvalidRequest(f"EBNF rule {name!r} refers to {ref!r}, which is not defined")
    return _Writer(rules).lark()


def _tokens(text: str) -> Iterator[Token]:
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise InvalidRequest(f"EBNF line {line}: {text[at : at + 12].splitlines()[0]!r} is not understood")
        if found.lastgroup and found.lastgroup != "skip":
            yield Token(found.lastgroup, found[0], line)
        line += found[0].count("\n")
        at = found.end()


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._at < len(self._tokens):
            if not self._begins_rule():
                raise self._fault("a rule `name ::= …` is expected")
            name = self._take().text
            self._take()
            if name in rules:
                raise InvalidRequest(f"EBNF rule {name!r} is defined twice")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._next() == "|":
            self._take()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._next() not in ("", "|", ")") and not self._begins_rule():
            items.append(self._repeated(self._item()))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Node:
        token = self._take()
        try:
            if token.kind == "text":
                return Text(text_of(token.text[1:-1]))
            if token.kind == "chars":
                return Chars(chars_of(token.text))
        except InvalidRequest as error:
            raise InvalidRequest(f"EBNF line {token.line}: {error.message}") from None
        if token.kind == "name":
            return Ref(token.text)
        if token.text != "(":
            self._at -= 1
            raise self._fault(f"{token.text!r} has nothing to stand behind")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._fault(f"more than {MAX_DEPTH} open brackets")
        inner = self._choice()
        self._depth -= 1
        if self._next() != ")":
            raise self._fault("a bracket is not closed")
        self._take()
        return inner

    def _repeated(self, item: Node) -> Node:
        if self._at == len(self._tokens) or self._tokens[self._at].kind != "repeat":
            return item
        text = self._take().text
        if text in "*+?":
            return Repeat(item, int(text == "+"), 1 if text == "?" else None)
        low, comma, high = text[1:-1].partition(",")
        least, most = int(low), (int(high) if high else None) if comma else int(low)
        if most is not None and most < least:
            self._at -= 1
            raise self._fault(f"{text!r} is no number of times")
        return Sequence(()) if most == 0 else Repeat(item, least, most)

    def _begins_rule(self) -> bool:
        kinds = [token.kind for token in self._tokens[self._at : self._at + 2]]
        return kinds == ["name", "define"]

    def _next(self) -> str:
        return self._tokens[self._at].text if self._at < len(self._tokens) else ""

    def _take(self) -> Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _fault(self, what: str) -> InvalidRequest:
        line = self._tokens[min(self._at, len(self._tokens) - 1)].line
        return InvalidRequest(f"EBNF line {line}: {what}")


def _parts(node: Node) -> tuple[Node, ...]:
    match node:
        case Repeat(item=item):
            return (item,)
        case Sequence(items=items):
            return items
        case Choice(options=options):
            return options
    return ()


def _refs(node: Node) -> Iterator[str]:
    if isinstance(node, Ref):
        yield node.name
    for part in _parts(node):
        yield from _refs(part)


class _Writer:
    """Rules that never come back to themselves are terminals (`T0`), the others rules (`r0`), their lexemes `L0`."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._terminals = dict.fromkeys(_acyclic(rules))
        self._lexemes: dict[Node, str] = {}

    def lark(self) -> str:
        lines = [f"T{self._numbers[name]}: {self._terminal(self._rules[name])}" for name in self._terminals]
        lines += [f"r{number}: {self._rule(self._rules[name])}" for name, number in self._numbers.items()
                  if name not in self._terminals]
        start = self._rule(Ref(ROOT))
        lexemes = [f"{name}: {self._terminal(node)}" for node, name in self._lexemes.items()]
        return "\n".join([f"start: {start}", *lines, *lexemes]) + "\n"

    def _is_terminal(self, node: Node) -> bool:
        return all(ref in self._terminals for ref in _refs(node))

    def _terminal(self, node: Node) -> str:
        match node:
            case Text(value=value):
                return json.dumps(value)
            case Chars(regex=regex):
                return f"/{regex}/"
            case Ref(name=name):
                return f"T{self._numbers[name]}"
            case Repeat(item=item, least=least, most=most):
                return f"({self._terminal(item)}){_count(least, most)}"
            case Sequence(items=items):
                return " ".join(map(self._terminal, items)) or '""'
            case Choice(options=options):
                return f"({' | '.join(map(self._terminal, options))})"

    def _rule(self, node: Node) -> str:
        if self._is_terminal(node):
            return self._lexeme(node)
        match node:
            case Repeat(item=item, least=least, most=most):
                return f"({self._rule(item)}){_count(least, most)}"
            case Sequence(items=items):
                return " ".join(map(self._rule, self._joined(items)))
            case Choice(options=options):
                return f"({' | '.join(map(self._rule, options))})"
            case Ref(name=name):
                return f"r{self._numbers[name]}"
        raise AssertionError("a text and a set of characters are terminals")

    def _lexeme(self, node: Node) -> str:
        return self._lexemes.setdefault(node, f"L{len(self._lexemes)}")

    def _joined(self, items: tuple[Node, ...]) -> Iterator[Node]:
        """The items of a rule, terminals that are neighbours as one."""
        run: list[Node] = []
        for item in items:
            if self._is_terminal(item):
                run.append(item)
                continue
            if run:
                yield Sequence(tuple(run))
            run = []
            yield item
        if run:
            yield Sequence(tuple(run))


def _acyclic(rules: dict[str, Node]) -> list[str]:
    """Rules from which no way leads back to a rule on it, each after those that it refers to."""
    used_by: dict[str, set[str]] = {name: set() for name in rules}
    num_open = {}
    for name, body in rules.items():
        refs = set(_refs(body))
        num_open[name] = len(refs)
        for ref in refs:
            used_by[ref].add(name)
    done = [name for name in rules if not num_open[name]]
    for name in done:
        for user in sorted(used_by[name]):
            num_open[user] -= 1
            if not num_open[user]:
                done.append(user)
    return done


def _count(least: int, most: int | None) -> str:
    plain = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
    return plain or f"{{{least},{'' if most is None else most}}}"
