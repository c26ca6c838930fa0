"""W3C trace context and request id of the current task.

The OpenTelemetry API carries the context; without an SDK a caller's `traceparent` still passes through every
hop unchanged. Carriers are flat string maps: HTTP headers, gRPC metadata, NATS headers, message fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import context as otel_context
from opentelemetry import propagate

REQUEST_ID_KEY = "x-request-id"
TRACE_KEYS = ("traceparent", "tracestate", "baggage")

request_id: ContextVar[str] = ContextVar("request_id", default="")


def carrier() -> dict[str, str]:
    """The current context as a flat map; empty when there is none."""
    out: dict[str, str] = {}
    propagate.inject(out)
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
