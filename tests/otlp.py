"""An OTLP receiver over gRPC for tests, and what it has received, trace by trace.

    with OtlpReceiver() as receiver:
        with RunningStack(tmp_path, env=receiver.env) as stack:
            ...
        traces = receiver.traces()
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """Ids as hex digits, times in nanoseconds since 1970."""

    service: str
    instance: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str, dict[str, Any]], ...]  # trace id, span id, attributes
    failed: bool

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OtlpReceiver:
    """Listens on a free port of the loopback while entered. `answers` False: accepts calls and never answers them."""

    def __init__(self, *, answers: bool = True) -> None:
        self._lock = threading.Lock()
        self._spans: list[ReceivedSpan] = []
        self._answers, self._over = answers, threading.Event()
        self.num_exports = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            _Servicer(self), self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.stop(grace=None).wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def env(self) -> dict[str, str]:
        """For services that are to export here, soon after a span has ended."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Trace id → its spans, the earliest first."""
        found: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
        for span in sorted(self.spans(), key=lambda s: s.start_ns):
            found[span.trace_id].append(span)
        return dict(found)

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        if not self._answers:
            self._over.wait()
        spans = list(_received(request))
        with self._lock:
            self.num_exports += 1
            self._spans += spans


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, receiver: OtlpReceiver) -> None:
        self._receiver = receiver

    def Export(  # noqa: N802
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._receiver.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def _received(request: trace_service_pb2.ExportTraceServiceRequest) -> list[ReceivedSpan]:
    out = []
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for span in (s for scope in resource_spans.scope_spans for s in scope.spans):
            out.append(ReceivedSpan(
                service=resource["service.name"], instance=resource.get("service.instance.id", ""), name=span.name,
                kind=span.kind, trace_id=span.trace_id.hex(), span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(), start_ns=span.start_time_unix_nano,
                end_ns=span.end_time_unix_nano, attributes=_attributes(span.attributes),
                links=tuple((link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes))
                            for link in span.links),
                failed=span.status.code == span.status.STATUS_CODE_ERROR))
    return out


def _attributes(found: Sequence[KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
