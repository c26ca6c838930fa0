"""`shoal trace`: one request's spans as lines of text, each with a bar at its place in time.

A call has a span at both ends: the two are one line, with the caller's times and the name of who was called.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import typer

from common.errors import NotFound
from stack.otlp_spans import TraceSpan, one_trace, read_spans

_WIDTH: Final = 100
_NAME, _WHERE, _NUMBER, _BAR = 19, 11, 8, 24  # columns
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_SHOWN: Final = {  # attribute → what it is called here, in this order
    "error.type": "error", "gen_ai.usage.input_tokens": "in", "gen_ai.usage.output_tokens": "out",
    "gen_ai.usage.cache_read.input_tokens": "cached", "shoal.route.choice": "to", "shoal.kv.from": "from",
    "shoal.kv.found_blocks": "found", "shoal.prefill.computed_tokens": "computed",
    "shoal.prefill.cached_tokens": "cached", "shoal.kv.blocks": "blocks", "shoal.decode.steps": "steps",
}


@dataclass(eq=False)
class Line:
    """A span with those below it; `where` and `attributes` also from the called end of the same call."""

    span: TraceSpan
    depth: int
    where: str
    attributes: Mapping[str, Any]
    below: list[Line] = field(default_factory=list)

    @property
    def ms(self) -> float:
        return (self.span.end_ns - self.span.start_ns) / 1e6


def print_trace(file: Path, request_id: str, most_lines: int) -> None:
    """`file` "-" is the standard input. Raises `NotFound` or `InvalidRequest`."""
    if str(file) == "-":
        spans = read_spans(sys.stdin, "standard input")
    elif file.is_file():
        with file.open(encoding="utf-8", errors="replace") as lines:
            spans = read_spans(lines, str(file))
    else:
        raise NotFound(f"{file}: no such file", param="file")
    typer.echo("\n".join(waterfall(one_trace(spans, request_id), most_lines)))


def waterfall(spans: Sequence[TraceSpan], most_lines: int) -> list[str]:
    """Lines of text, at most `most_lines` with the two of the head: the shortest spans are left out, and counted."""
    lines = _flat(_tree(spans))
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    room = max(1, most_lines - 2)
    kept = lines if len(lines) <= room else _longest(lines, max(1, room - 1))
    bar_ms = (end - start) / 1e6 or 1.0
    head = (f"{'span':<{_NAME}} {'where':<{_WHERE}}{'start ms':>{_NUMBER + 1}}{'took ms':>{_NUMBER}} "
            f"0{f'{bar_ms:.0f} ms':>{_BAR - 1}}")
    found = [f"trace {spans[0].trace_id}", head, *(_text(line, start, bar_ms) for line in kept)]
    if len(kept) < len(lines):
        longest = max(line.ms for line in lines if line not in kept)
        found.append(f"and {len(lines) - len(kept)} spans of at most {longest:.1f} ms")
    return found


def _tree(spans: Sequence[TraceSpan]) -> list[Line]:
    """The roots. A span whose parent is not among `spans`, for a client began the trace, is one."""
    known = {span.span_id for span in spans}
    children: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        children[span.parent_id if span.parent_id in known else ""].append(span)

    def grow(span: TraceSpan, depth: int) -> Line:
        line, below = Line(span, depth, span.where, span.attributes), children[span.span_id]
        for child in list(below):
            if child.name == span.name and child.where != span.where:
                line.where, line.attributes = child.where, {**span.attributes, **child.attributes}
                below.remove(child)
                below += children[child.span_id]
        line.below = [grow(child, depth + 1) for child in sorted(below, key=lambda s: (s.start_ns, -s.end_ns))]
        return line

    return [grow(span, 0) for span in children[""]]


def _flat(lines: Sequence[Line]) -> list[Line]:
    return [each for line in lines for each in (line, *_flat(line.below))]


def _longest(lines: Sequence[Line], number: int) -> list[Line]:
    """In the order of `lines`; of equals the first, so that a parent stays."""
    ranked = sorted(range(len(lines)), key=lambda i: (-lines[i].ms, i))
    return [lines[i] for i in sorted(ranked[:number])]


def _text(line: Line, start_ns: int, whole_ms: float) -> str:
    name = (" " * line.depth + line.span.name.partition(" ")[0])[:_NAME]
    begin_ms = (line.span.start_ns - start_ns) / 1e6
    text = (f"{name:<{_NAME}} {line.where[:_WHERE]:<{_WHERE}} {begin_ms:{_NUMBER}.1f}{line.ms:{_NUMBER}.1f} "
            f"{_bar(begin_ms / whole_ms, line.ms / whole_ms)}")
    for key, word in _SHOWN.items():
        more = f" {word}={line.attributes[key]}" if line.attributes.get(key) not in (None, "") else ""
        if len(text) + len(more) <= _WIDTH:
            text += more
    return text.rstrip()


def _bar(begin: float, share: float) -> str:
    """`begin` and `share` of the whole, 0 to 1. What is too short to see is the thinnest bar."""
    first = min(int(begin * _BAR), _BAR - 1)
    eighths = max(1, round(share * _BAR * 8))
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return f"{' ' * first}{bar}"[:_BAR].ljust(_BAR)
