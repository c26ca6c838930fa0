"""Refuses regexes whose nested repetitions blow up. Torch-free.

The engine of derivatives takes a repetition as it is, so `.{100000}` is cheap; but repetitions of repetitions
(`(a{1000}){1000}`) are tried in every way that a token can fall on them: seconds for one mask. What counts is the
product of the upper bounds along the deepest nest.
"""

from __future__ import annotations

import re

from engine.grammar.llguidance_state import refusal

MAX_REGEX_CHARS = 32 << 10
MAX_NESTED_REPEATS = 20_000

_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P?<\w+>|[a-zA-Z-]*:))?|.", re.DOTALL)
_COUNT = re.compile(r"\{(\d{0,10})(?:,(\d{0,10}))?\}")


def check_regex(regex: str, where: str) -> None:
    """Raise `InvalidRequest` naming `where` for a regex that is too long or repeats too deeply."""
    if len(regex) > MAX_REGEX_CHARS:
        raise refusal(f"{where} is too long: {len(regex)} characters, the limit is {MAX_REGEX_CHARS}")
    repeats = nested_repeats(regex)
    if repeats > MAX_NESTED_REPEATS:
        raise refusal(f"{where}: repetitions of repetitions come to more than {MAX_NESTED_REPEATS}, the limit")


def nested_repeats(regex: str) -> int:
    """The largest product of counted repetitions that contain one another; 1 where none does."""
    worst = 1
    open_groups = [1]  # the largest product within each open group, outermost first
    at = 0
    while atom := _ATOM.match(regex, at):
        at = atom.end()
        text, inner = atom[0], 1
        if text[0] == "(":
            open_groups.append(1)
            continue
        if text == ")" and len(open_groups) > 1:
            inner = open_groups.pop()
        product = inner
        while count := _COUNT.match(regex, at):
            at = count.end()
            product *= max(1, int(count[2] or count[1] or 1))
            is_nested = product > inner > 1 or _COUNT.match(regex, at) is not None
            worst = max(worst, product if is_nested else worst)
            inner = product = min(product, MAX_NESTED_REPEATS + 1)
        open_groups[-1] = max(open_groups[-1], product)
    return worst
