"""Spans from OTLP JSON lines, which is what the OpenTelemetry Collector's file exporter writes: one export a line.

Source of the format: https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from common.errors import InvalidRequest, NotFound

MOST_SPANS: Final = 1_000_000  # of a file; they are held in memory
_IDS: Final = ("shoal.client_request_id", "gen_ai.response.id")  # attributes of a request's own span


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """Ids as hex digits, times in nanoseconds since 1970. `where` is the process, `parent_id` empty at a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    where: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]


def read_spans(lines: Iterable[str], source: str) -> list[TraceSpan]:
    """A last line that is not whole, for it is being written, is left out.

    Raises `InvalidRequest` with `source` and the number of a line that is no OTLP JSON, or beyond `MOST_SPANS`.
    """
    found: list[TraceSpan] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found += _spans(msgspec.json.decode(line, type=_Export))
        except (msgspec.DecodeError, ValueError) as error:
            if not line.endswith("\n"):
                break
            raise InvalidRequest(f"{source}, line {number}: not OTLP JSON: {error}", param="file") from None
        if len(found) > MOST_SPANS:
            raise InvalidRequest(f"{source}: more than {MOST_SPANS} spans", param="file")
    return found


def one_trace(spans: Sequence[TraceSpan], request_id: str = "") -> list[TraceSpan]:
    """The spans of one request, the earliest first; of the newest request without an id.

    `request_id` is what the client sent or was answered, or the trace's id. Raises `NotFound`.
    """
    roots = sorted((span for span in spans if any(name in span.attributes for name in _IDS)), key=lambda s: s.start_ns)
    for root in reversed(roots):
        ids = [root.trace_id, *(str(root.attributes.get(name, "")) for name in _IDS)]
        if not request_id or any(each and (request_id == each or request_id.endswith(f"-{each}")) for each in ids):
            return sorted((span for span in spans if span.trace_id == root.trace_id),
                          key=lambda s: (s.start_ns, -s.end_ns))
    wanted = f"request {request_id}" if request_id else "request"
    raise NotFound(f"no span of a {wanted} among {len(spans)} spans", param="request_id")


class _Value(msgspec.Struct, rename="camel"):
    """One field is set. 64-bit integers are strings in OTLP JSON."""

    string_value: str | None = None
    int_value: int | str | None = None
    double_value: float | None = None
    bool_value: bool | None = None

    def plain(self) -> Any:
        if self.int_value is not None:
            return int(self.int_value)
        return next((v for v in (self.string_value, self.double_value, self.bool_value) if v is not None), None)


class _Attribute(msgspec.Struct):
    key: str
    value: _Value


class _Span(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: int | str
    end_time_unix_nano: int | str
    parent_span_id: str = ""
    attributes: list[_Attribute] = []


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct):
    attributes: list[_Attribute] = []


class _ResourceSpans(msgspec.Struct, rename="camel"):
    scope_spans: list[_Scope] = []
    resource: _Resource = msgspec.field(default_factory=_Resource)


class _Export(msgspec.Struct, rename="camel"):
    resource_spans: list[_ResourceSpans]


def _spans(export: _Export) -> list[TraceSpan]:
    found = []
    for resource_spans in export.resource_spans:
        resource = {each.key: each.value.plain() for each in resource_spans.resource.attributes}
        where = str(resource.get("service.instance.id") or resource.get("service.name", ""))
        for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
            found.append(TraceSpan(
                span.trace_id, span.span_id, span.parent_span_id, span.name, where, int(span.start_time_unix_nano),
                int(span.end_time_unix_nano), {each.key: each.value.plain() for each in span.attributes}))
    return found
