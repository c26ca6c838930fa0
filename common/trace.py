"""The trace and the request id of the current task, and the spans that this process adds to the trace.

The OpenTelemetry API carries the context; without an exporter a caller's `traceparent` still passes through every
hop unchanged, and every function here that makes spans returns one that records nothing. Carriers are flat string
maps: HTTP headers, gRPC metadata, NATS headers, message fields.

A trace begins only at `root`. Everything else is a child of the current span, or of one that is named, and records
only where that one is sampled: work that belongs to no request is never traced.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import propagate
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from common.span import NO_SPAN, Attributes, RecordedSpan, Sink, Span, SpanLink, UnsampledSpan

REQUEST_ID_KEY = "x-request-id"
TRACE_KEYS = ("traceparent", "tracestate", "baggage")
INTERNAL, SERVER, CLIENT, CONSUMER = SpanKind.INTERNAL, SpanKind.SERVER, SpanKind.CLIENT, SpanKind.CONSUMER

Sampler = Callable[[Context, int, str, SpanKind], bool]  # (context of the caller, trace id, name, kind)

request_id: ContextVar[str] = ContextVar("request_id", default="")

_MAX_CHARS: Final = 2048
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_sink: Sink | None = None
_sampler: Sampler | None = None


def record_to(sink: Sink | None, sampler: Sampler | None = None) -> None:
    """Hand ended spans to `sink` from now on, those of the traces that `sampler` chooses (None: all); None: stop."""
    global _sink, _sampler
    _sink, _sampler = sink, sampler


def carrier(span: Span = NO_SPAN) -> dict[str, str]:
    """The current context, or that below `span` when it is recorded, as a flat map; empty when there is none.

    A client's baggage or state beyond `_MAX_CHARS` goes no further: metadata of some 8 KB makes gRPC refuse calls.
    """
    out: dict[str, str] = {}
    propagate.inject(out, otel_trace.set_span_in_context(span) if isinstance(span, RecordedSpan) else None)
    for key in ("baggage", "tracestate"):
        if len(out.get(key, "")) > _MAX_CHARS:
            del out[key]
    if request_id.get():
        out[REQUEST_ID_KEY] = request_id.get()
    return out


def adopt(received: Mapping[str, str]) -> None:
    """Go on in the context that a carrier describes: for a task that serves one call and then ends."""
    otel_context.attach(propagate.extract(dict(received)))
    request_id.set(received.get(REQUEST_ID_KEY, request_id.get()))


@contextmanager
def attached(received: Mapping[str, str]) -> Iterator[None]:
    """Run the body in the context that a carrier describes."""
    token = otel_context.attach(propagate.extract(dict(received)))
    reset = request_id.set(received.get(REQUEST_ID_KEY, request_id.get()))
    try:
        yield
    finally:
        request_id.reset(reset)
        otel_context.detach(token)


@contextmanager
def below(span: Span) -> Iterator[None]:
    """Run the body with `span` as the current one; it does not end with the body."""
    if not isinstance(span, RecordedSpan):
        yield
        return
    token = otel_context.attach(otel_trace.set_span_in_context(span))
    try:
        yield
    finally:
        otel_context.detach(token)


def stay_below(span: Span) -> None:
    """The same for the rest of a task that serves one call and then ends."""
    if isinstance(span, RecordedSpan):
        otel_context.attach(otel_trace.set_span_in_context(span))


def current() -> Span:
    """The recorded span that the task is in; `NO_SPAN` where there is none."""
    span = otel_trace.get_current_span()
    return span if isinstance(span, RecordedSpan) else NO_SPAN


def trace_id() -> str:
    """Of the current trace, recorded here or not, as 32 hex digits; empty without one."""
    context = otel_trace.get_current_span().get_span_context()
    return format(context.trace_id, "032x") if context.is_valid else ""


def sampled_context(received: Mapping[str, str] | None = None) -> SpanContext | None:
    """The span that a carrier (None: the current task) is in, as a parent or a link; None where nothing is recorded."""
    if _sink is None:
        return None
    span = otel_trace.get_current_span(None if received is None else propagate.extract(dict(received)))
    context = span.get_span_context()
    return context if context.trace_flags & TraceFlags.SAMPLED else None


def root(
    name: str, kind: SpanKind = INTERNAL, *, attributes: Attributes | None = None, links: Sequence[SpanLink] = ()
) -> Span:
    """A span that continues the caller's trace, if the current context is one, or begins a trace.

    The sampler decides; the usual one respects what the caller has decided. Use it as a context manager.
    """
    if _sink is None:
        return NO_SPAN
    parent: SpanContext | None = otel_trace.get_current_span().get_span_context()
    if parent is not None and not parent.is_valid:
        parent = None
    new_trace_id = parent.trace_id if parent else random.getrandbits(128) or 1
    chosen = _sampler is None or _sampler(otel_context.get_current(), new_trace_id, name, kind)
    context = _new_context(new_trace_id, parent, _SAMPLED if chosen else _UNSAMPLED)
    if not chosen:
        return UnsampledSpan(context)
    return RecordedSpan(name, kind, context, parent, _sink, attributes=attributes, links=links)


def span(
    name: str, kind: SpanKind = INTERNAL, attributes: Attributes | None = None, *, parent: Span | None = None,
    links: Sequence[SpanLink] = (), start_ns: int = 0,
) -> Span:
    """A child of `parent`, or of the current span. Enter it, or `finish` it: a `with` block makes it current."""
    if _sink is None:
        return NO_SPAN
    above = sampled_context() if parent is None else parent.context
    if above is None:
        return NO_SPAN
    return RecordedSpan(name, kind, _new_context(above.trace_id, above, _SAMPLED), above, _sink,
                        attributes=attributes, links=links, start_ns=start_ns)


def span_at(
    name: str, start_ns: int, end_ns: int, attributes: Attributes, *, parent: SpanContext | None, error: str = ""
) -> None:
    """Record what is over already; nothing without a `parent`."""
    if _sink is None or parent is None:
        return
    made = RecordedSpan(name, INTERNAL, _new_context(parent.trace_id, parent, _SAMPLED), parent, _sink,
                        attributes=attributes, start_ns=start_ns)
    if error:
        made.fail(error)
    made.finish(max(start_ns, end_ns))


def _new_context(of_trace: int, parent: SpanContext | None, flags: TraceFlags) -> SpanContext:
    return SpanContext(
        of_trace, random.getrandbits(64) or 1, is_remote=False, trace_flags=flags,
        trace_state=parent.trace_state if parent else None)
