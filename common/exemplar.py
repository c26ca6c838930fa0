"""The trace that an observation belongs to, in the form that OpenMetrics wants."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from opentelemetry import trace as otel_trace

_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def current_exemplar() -> dict[str, str] | None:
    """Trace and span id of the current span; None when nobody records it, so the link would lead nowhere."""
    span = otel_trace.get_current_span()
    if not span.is_recording():
        return None
    context = span.get_span_context()
    if not context.trace_flags.sampled:
        return None
    return {"trace_id": format(context.trace_id, "032x"), "span_id": format(context.span_id, "016x")}


def exemplar_of(carrier: Mapping[str, str]) -> dict[str, str] | None:
    """The same of a context that came by message: its W3C `traceparent`, if that says that it is sampled."""
    found = _TRACEPARENT.fullmatch(carrier.get("traceparent", ""))
    if found is None or not int(found[3], 16) & 1:
        return None
    return {"trace_id": found[1], "span_id": found[2]}
