"""The trace that an observation belongs to, in the form that OpenMetrics wants."""

from __future__ import annotations

from opentelemetry import trace as otel_trace


def current_exemplar() -> dict[str, str] | None:
    """Trace and span id of the current span; None when nobody records it, so the link would lead nowhere."""
    span = otel_trace.get_current_span()
    if not span.is_recording():
        return None
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return None
    return {"trace_id": format(context.trace_id, "032x"), "span_id": format(context.span_id, "016x")}
