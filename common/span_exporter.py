"""Our spans as OTLP messages. Loaded only where traces are exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.resources import Resource

from common.span import RecordedSpan

# OTLP numbers kinds from 1. Flags: sampled, "the next bit is known", "the parent is in another process".
_KIND_OFFSET: Final = 1
_FLAGS, _FLAG_REMOTE_PARENT = 0x101, 0x200
_FIELDS: Final = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}  # of AnyValue


class SpanExporter(OTLPSpanExporter):
    """The SDK's exporter, with its endpoint, security, retries and timeouts, fed with our spans."""

    def __init__(self, resource: Resource, version: str) -> None:
        super().__init__()
        self._resource = resource_pb2.Resource()
        _put(self._resource.attributes, resource.attributes)
        self._scope = InstrumentationScope(name="shoal", version=version)

    def _translate_data(self, data: Sequence[RecordedSpan]) -> ExportTraceServiceRequest:  # type: ignore[override]
        return encode(data, self._resource, self._scope)


def encode(
    spans: Sequence[RecordedSpan], resource: resource_pb2.Resource, scope: InstrumentationScope
) -> ExportTraceServiceRequest:
    """All spans of one process. Filled in place: protobuf's copies of messages cost more than all the rest."""
    request = ExportTraceServiceRequest()
    found = request.resource_spans.add(resource=resource).scope_spans.add(scope=scope).spans
    for span in spans:
        _add(found, span)
    return request


def _add(found: Any, span: RecordedSpan) -> None:
    context, parent = span.context, span.parent
    made = found.add(
        trace_id=context.trace_id.to_bytes(16, "big"), span_id=context.span_id.to_bytes(8, "big"), name=span.name,
        kind=span.kind.value + _KIND_OFFSET, start_time_unix_nano=span.start_ns, end_time_unix_nano=span.end_ns,
        flags=_FLAGS | _FLAG_REMOTE_PARENT if parent is not None and parent.is_remote else _FLAGS)
    if parent is not None:
        made.parent_span_id = parent.span_id.to_bytes(8, "big")
    if context.trace_state:
        made.trace_state = context.trace_state.to_header()
    _put(made.attributes, span.attributes)
    for link in span.links:
        _put(made.links.add(
            trace_id=link.context.trace_id.to_bytes(16, "big"), span_id=link.context.span_id.to_bytes(8, "big"),
            flags=_FLAGS).attributes, link.attributes)
    for event in span.events:
        made.events.add(name=event.name, time_unix_nano=event.at_ns)
    if span.error_type:
        made.status.code = Status.STATUS_CODE_ERROR
        made.status.message = span.error_type
        _put(made.attributes, {"error.type": span.error_type})


def _put(found: Any, attributes: Mapping[str, object]) -> None:
    for key, value in attributes.items():
        made = found.add()
        made.key = key
        if isinstance(value, list | tuple):
            for each in value:
                _set(made.value.array_value.values.add(), each)
        else:
            _set(made.value, value)


def _set(made: Any, value: object) -> None:
    field = _FIELDS.get(type(value))
    if field is not None:
        setattr(made, field, value)
    else:
        made.string_value = str(value)
