"""JSON logs with service, request and trace ids; never prompt text."""

from __future__ import annotations

import logging
import sys

import structlog
from opentelemetry import trace as otel_trace
from structlog.typing import EventDict, Processor, WrappedLogger

from common.trace import request_id


def _ids(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    if request_id.get():
        event.setdefault("request_id", request_id.get())
    span = otel_trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = format(span.trace_id, "032x")
        event["span_id"] = format(span.span_id, "016x")
    return event


def setup(service: str, service_id: str, level: str, fmt: str) -> None:
    """Route structlog and the standard library's loggers to one line per event on stderr."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, _ids,
        structlog.processors.TimeStamper(fmt="iso", utc=True), structlog.processors.format_exc_info,
    ]
    final: Processor = structlog.processors.JSONRenderer() if fmt == "json" else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, final], foreign_pre_chain=shared))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "asyncio", "nats.aio.client"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    structlog.contextvars.bind_contextvars(service=service, service_id=service_id)


def get(name: str) -> structlog.stdlib.BoundLogger:
    """A logger; call with an event name and facts: `log.info("worker_lost", worker_id=...)`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(name)
    return logger
