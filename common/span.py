"""A span as our processes record it: the OpenTelemetry API's `Span`, made small.

States of a `RecordedSpan`: open → ended, which hands it to whoever exports. `Span` itself records nothing: it stands
where tracing is off or the trace is not sampled, so callers never ask which of the two they hold.

The SDK's own span takes about 50 microseconds to make and as long to encode, ours a sixth of that; a request has a
dozen or more (bench/telemetry.py measures what they cost).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from types import TracebackType
from typing import Final, NamedTuple, Self

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind

from common.errors import Cancelled, ShoalError

Value = str | bool | int | float | Sequence[str] | Sequence[float]
Attributes = Mapping[str, Value]
Sink = Callable[["RecordedSpan"], None]


class SpanLink(NamedTuple):
    """Another span that this one is due to, which is not its parent."""

    context: SpanContext
    attributes: Attributes


class SpanEvent(NamedTuple):
    name: str
    at_ns: int


class Span:
    """A span that is not recorded; also what callers may do with one that is. Times are nanoseconds since 1970."""

    __slots__ = ()
    recording = False
    start_ns = 0
    context: SpanContext | None = None
    error_type = ""  # set: it has failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def rename(self, name: str) -> None:
        return

    def put(self, attributes: Attributes) -> None:
        """Add attributes. Never a client's text: names, ids, counts and times."""

    def event(self, name: str, at_ns: int = 0) -> None:
        """Something at one moment; now when `at_ns` is 0."""

    def fail(self, error: BaseException | str) -> None:
        """Status `error` with `error.type`: our code, `cancelled`, or the class. Only the first one counts."""

    def finish(self, end_ns: int = 0) -> None:
        """End it, now when `end_ns` is 0. Again is harmless."""


NO_SPAN: Final = Span()


class UnsampledSpan(Span):
    """The root of a trace that was not chosen: those who are called learn it and do not choose anew."""

    __slots__ = ("_attached", "_span")

    def __init__(self, context: SpanContext) -> None:
        self._span = NonRecordingSpan(context)
        self._attached: Token[Context] | None = None

    def __enter__(self) -> Self:
        self._attached = otel_context.attach(otel_trace.set_span_in_context(self._span))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._attached is not None
        otel_context.detach(self._attached)


class RecordedSpan(Span, otel_trace.Span):
    """As a context manager it is the current span inside, and ends with the block, failed by what the block raises."""

    __slots__ = (
        "_attached", "_sink", "attributes", "context", "end_ns", "error_type", "events", "kind", "links", "name",
        "parent", "start_ns")
    recording = True
    context: SpanContext
    start_ns: int

    def __init__(
        self, name: str, kind: SpanKind, context: SpanContext, parent: SpanContext | None, sink: Sink, *,
        start_ns: int = 0, attributes: Attributes | None = None, links: Sequence[SpanLink] = (),
    ) -> None:
        self.name, self.kind, self.context, self.parent, self._sink = name, kind, context, parent, sink
        self.start_ns, self.end_ns = start_ns or time.time_ns(), 0
        self.attributes: dict[str, Value] = dict(attributes) if attributes else {}
        self.links = links
        self.events: list[SpanEvent] = []
        self.error_type = ""
        self._attached: Token[Context] | None = None

    def __enter__(self) -> Self:
        self._attached = otel_context.attach(otel_trace.set_span_in_context(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._attached is not None:
            otel_context.detach(self._attached)
        if error is not None:
            self.fail(error)
        self.finish()

    def rename(self, name: str) -> None:
        self.name = name

    def put(self, attributes: Attributes) -> None:
        self.attributes.update(attributes)

    def event(self, name: str, at_ns: int = 0) -> None:
        self.events.append(SpanEvent(name, at_ns or time.time_ns()))

    def fail(self, error: BaseException | str) -> None:
        if not self.end_ns and not self.error_type:
            self.error_type = error if isinstance(error, str) else error_type(error)

    def finish(self, end_ns: int = 0) -> None:
        if not self.end_ns:
            self.end_ns = end_ns or time.time_ns()
            self._sink(self)

    # The rest is the OpenTelemetry API, for code that knows no other: log lines and exemplars.

    def get_span_context(self) -> SpanContext:
        return self.context

    def is_recording(self) -> bool:
        return not self.end_ns

    def end(self, end_time: int | None = None) -> None:
        self.finish(end_time or 0)

    def set_attribute(self, key: str, value: object) -> None:
        self.attributes[key] = value  # type: ignore[assignment]

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        self.attributes.update(attributes)  # type: ignore[arg-type]

    def add_event(self, name: str, attributes: object = None, timestamp: int | None = None) -> None:
        self.event(name, timestamp or 0)

    def update_name(self, name: str) -> None:
        self.name = name

    def set_status(self, status: object, description: str | None = None) -> None:
        self.fail(description or "error")

    def record_exception(
        self, exception: BaseException, attributes: object = None, timestamp: int | None = None, escaped: bool = False
    ) -> None:
        self.fail(exception)


def error_type(error: BaseException) -> str:
    """From a closed set: never a message, which may quote what a client sent."""
    if isinstance(error, ShoalError):
        return error.code
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return Cancelled.code
    return type(error).__name__
