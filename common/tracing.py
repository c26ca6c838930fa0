"""Sends this process's spans to an OTLP endpoint, as the standard OpenTelemetry variables ask.

States: off (no endpoint: neither the SDK nor the exporter is loaded) or on → stopped. Spans wait in a bounded queue
for a thread that sends them in batches; a full queue drops the oldest, an endpoint that does not answer costs only what
waits for it, and a complaint about it is logged once in `COMPLAINT_S`. `stop` sends what is left, for `FLUSH_S` at
most.

OTEL_EXPORTER_OTLP_ENDPOINT (or …_TRACES_ENDPOINT) turns it on, OTEL_SDK_DISABLED and OTEL_TRACES_EXPORTER=none off.
OTEL_TRACES_SAMPLER(_ARG), OTEL_BSP_*, OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES and the exporter's variables for
headers, certificates, compression and timeouts are read by the SDK.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind

from common import trace
from common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

COMPLAINT_S: Final = 60.0
FLUSH_S: Final = 2.0
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """Made by `start_tracing`; `stop` once, when no more spans come."""

    def __init__(self, processor: BatchSpanProcessor | None = None) -> None:
        self._processor = processor

    @property
    def is_on(self) -> bool:
        return self._processor is not None

    def stop(self, limit_s: float = FLUSH_S) -> None:
        """Send what waits. Returns after `limit_s` whatever the endpoint does; its thread ends with the process."""
        if self._processor is not None:
            trace.record_to(None)
            flushing = threading.Thread(target=self._processor.shutdown, name="trace-flush", daemon=True)
            flushing.start()
            flushing.join(limit_s)


def start_tracing(
    service: str, service_id: str, version: str, environ: Mapping[str, str] = os.environ
) -> Tracing:
    """Record spans from now on, if the environment names an endpoint. Raises `ConfigError` naming the variable."""
    if not _is_asked(environ):
        return Tracing()
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import Decision

    from common.span_exporter import SpanExporter

    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).addFilter(_Seldom())
    own = Resource({"service.name": service, "service.namespace": "shoal", "service.instance.id": service_id,
                    "service.version": version, "process.pid": os.getpid()})
    resource: Resource = own.merge(OTELResourceDetector().detect())
    try:
        processor = BatchSpanProcessor(SpanExporter(resource, version))
        sampler = TracerProvider(resource=resource, shutdown_on_exit=False).sampler
    except ValueError as error:
        raise ConfigError(f"an OTEL_ variable is wrong: {error}", param="OTEL") from None

    chosen = Decision.RECORD_AND_SAMPLE

    def is_chosen(context: Context, trace_id: int, name: str, kind: SpanKind) -> bool:
        return sampler.should_sample(context, trace_id, name, kind).decision is chosen

    trace.record_to(processor.on_end, is_chosen)  # type: ignore[arg-type]  # it asks only whether a span is sampled
    return Tracing(processor)


def _is_asked(environ: Mapping[str, str]) -> bool:
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER: must be otlp or none, got {exporter!r}", param="OTEL_TRACES_EXPORTER")
    if not exporter and not any(environ.get(name, "").strip() for name in _ENDPOINTS):
        return False
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: must be grpc, got {protocol!r}",
                          param="OTEL_EXPORTER_OTLP_PROTOCOL")
    return True


class _Seldom(logging.Filter):
    """Lets one line of a logger through in `COMPLAINT_S`."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + COMPLAINT_S
        return True
