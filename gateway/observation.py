"""What is seen of each request from outside: its ids, counts, times and outcome, into metrics and one log line.

An `Observation` lives from the first byte of a request to its last answer byte. It is the outermost layer: it names
the request, begins its trace, adds `x-request-id` (and `x-trace-id`, where there is a trace) to every answer, and turns
a fault that nobody caught into a plain 500.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common import logs, trace
from common.errors import Cancelled, DeadlineExceeded, InternalError, ShoalError
from common.exemplar import current_exemplar
from common.span import Span
from gateway import genai_metrics, metrics, request_span
from gateway.errors import FAULT_TEXT, error_response
from gateway.goodput import SloLimits
from gateway.order import Order, Usage, new_request_id
from gateway.tenants.tenant import log_facts

log = logs.get(__name__)

_SCOPE_KEY = "shoal.observation"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET = frozenset({"/health", "/live", "/ping", "/ready", "/metrics", "/version", "/load"})  # counted, not logged
CLIENT_GONE_STATUS = 499


@dataclass(slots=True)
class Observation:
    """Filled by whoever works on the request. Times are of `time.perf_counter`."""

    client_id: str  # x-request-id: the caller's own, else ours
    started: float = field(default_factory=time.perf_counter)
    request_id: str = ""  # of the generation
    order: Order | None = None
    model: str = metrics.UNKNOWN_MODEL  # set only to a name that exists
    streams: bool = False
    status: int = 0  # 0: no answer was begun
    error: ShoalError | None = None
    finish_reasons: list[str] = field(default_factory=list)  # of the choices that have ended, in that order
    usage: Usage | None = None
    used: Usage | None = None  # tokens so far, whatever becomes of the request
    placed: Usage | None = None  # prompts that workers have been given
    first_content_s: float | None = None  # since the start
    last_contents: dict[int, float] = field(default_factory=dict)  # of each choice of a stream
    gaps_s: float = 0.0  # all gaps between content chunks of one choice
    itl: Histogram | None = None  # of the model, looked up once: a stream has many gaps

    def content(self, usage: Usage, choice: int = 0) -> None:
        """A content chunk of a choice was written to a stream."""
        now = time.perf_counter()
        if self.first_content_s is None:
            self.first_content_s = now - self.started
            metrics.TTFT_S.labels(self.model).observe(self.first_content_s, current_exemplar())
            self.itl = metrics.ITL_S.labels(self.model)
        elif self.itl is not None and choice in self.last_contents:
            gap_s = now - self.last_contents[choice]
            self.gaps_s += gap_s
            self.itl.observe(gap_s)
        self.last_contents[choice], self.usage = now, usage

    @property
    def charged(self) -> Usage | None:
        """What its tenant pays for. Before any output: the prompt if it was given up, nothing if it was refused."""
        if self.used is None and isinstance(self.error, (Cancelled, DeadlineExceeded)):
            return self.placed
        return self.used or self.usage

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first of its choice; None but for a stream with such tokens."""
        num_later = (self.usage.num_output_tokens if self.usage is not None else 0) - len(self.last_contents)
        return self.gaps_s / num_later if self.last_contents and num_later > 0 else None

    def prompts_placed(self, usage: Usage) -> None:
        """A worker is about to be given a prompt; `usage` has all tokens of the call so far."""
        if self.used is None:
            self.placed = usage
        else:
            self.used = usage

    def finished(self, finish_reason: str, usage: Usage) -> None:
        """One choice has ended well."""
        self.finish_reasons.append(finish_reason)
        self.usage = usage

    def failed(self, error: ShoalError) -> None:
        self.error = error


def observation(scope: Scope) -> Observation:
    """The observation of the request that this scope belongs to."""
    found: Observation = scope[_SCOPE_KEY]
    return found


class Observer:
    """ASGI middleware, the outermost."""

    def __init__(self, app: ASGIApp, slo: SloLimits = SloLimits()) -> None:  # noqa: B008 (frozen)
        self._app, self._slo = app, slo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        carrier = _carrier(scope)
        seen = Observation(carrier[trace.REQUEST_ID_KEY])
        scope[_SCOPE_KEY] = seen
        own_headers = [(b"x-request-id", seen.client_id.encode())]

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *own_headers]
            await send(message)

        with trace.attached(carrier), request_span.open_span(scope, wanted=scope["path"] not in _QUIET) as span:
            if trace_id := trace.trace_id():
                own_headers.append((b"x-trace-id", trace_id.encode()))
            try:
                await self._app(scope, receive, named_send)
            except ShoalError as error:
                seen.failed(error)
                await error_response(error)(scope, receive, named_send)
            except asyncio.CancelledError:  # the process ends
                seen.error = seen.error or Cancelled("the process ended before the answer did")
                raise
            except Exception as fault:
                seen.failed(InternalError(FAULT_TEXT))
                log.error("request_fault", exc_info=fault)
                if seen.status == 0:
                    await error_response(InternalError(FAULT_TEXT))(scope, receive, named_send)
            finally:
                _record(seen, scope, self._slo, span)


def _carrier(scope: Scope) -> dict[str, str]:
    """Trace context and request id of the caller; the first header counts, an id that is not plain is replaced."""
    wanted = {*trace.TRACE_KEYS, trace.REQUEST_ID_KEY}
    out: dict[str, str] = {}
    for name, value in scope["headers"]:
        key = name.decode("latin-1")
        if key in wanted:
            out.setdefault(key, value.decode("latin-1"))
    if not _REQUEST_ID.fullmatch(out.get(trace.REQUEST_ID_KEY, "")):
        out[trace.REQUEST_ID_KEY] = new_request_id()
    return out


def _record(seen: Observation, scope: Scope, slo: SloLimits, span: Span) -> None:
    total_s = time.perf_counter() - seen.started
    route = getattr(scope.get("route"), "path", metrics.UNMATCHED_PATH)
    gone = isinstance(seen.error, Cancelled)
    status = CLIENT_GONE_STATUS if gone else seen.status
    metrics.REQUESTS.labels(route, seen.model, str(status)).inc()
    if gone:
        metrics.ABORTED.inc()
    elif seen.error is not None:
        (metrics.STREAM_ERRORS if seen.status == 200 else metrics.REFUSED).labels(seen.error.code).inc()
    if seen.usage is not None:
        metrics.E2E_S.labels(seen.model).observe(total_s)
        metrics.PROMPT_TOKENS.labels(seen.model).inc(seen.usage.num_prompt_tokens)
        metrics.CACHED_TOKENS.labels(seen.model).inc(seen.usage.num_cached_tokens)
        metrics.OUTPUT_TOKENS.labels(seen.model).inc(seen.usage.num_output_tokens)
        metrics.REQUEST_PROMPT_TOKENS.labels(seen.model).observe(seen.usage.num_prompt_tokens)
        metrics.REQUEST_OUTPUT_TOKENS.labels(seen.model).observe(seen.usage.num_output_tokens)
    if route in genai_metrics.OPERATIONS:
        _record_generation(seen, route, total_s, slo)
    request_span.close_span(span, seen, scope, route, status)
    if route not in _QUIET:
        log.info("request", **_facts(seen, route, status, total_s), **log_facts(scope))


def _record_generation(seen: Observation, route: str, total_s: float, slo: SloLimits) -> None:
    tpot_s, error = seen.tpot_s, seen.error
    if tpot_s is not None:
        metrics.STREAM_TPOT_S.labels(seen.model).observe(tpot_s)
    genai_metrics.record(route, seen.model, error.code if error else "", total_s, seen.first_content_s, tpot_s,
                         current_exemplar())
    is_ours = error is None or (error.http_status >= 500 and not isinstance(error, Cancelled))
    if is_ours:
        slo.judge(seen.model, seen.first_content_s, tpot_s, failed=error is not None)


def _finish(seen: Observation) -> str:
    """The finish reason that most choices have."""
    reasons = seen.finish_reasons
    return max(reasons, key=reasons.count) if reasons else "ok"


def _facts(seen: Observation, route: str, status: int, total_s: float) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "request_id": seen.client_id, "endpoint": route, "model": seen.model, "status": status,
        "stream": seen.streams, "total_s": round(total_s, 6),
        "outcome": seen.error.code if seen.error else _finish(seen)}
    if seen.request_id:
        facts["id"] = seen.request_id
    if seen.first_content_s is not None:
        facts["ttft_s"] = round(seen.first_content_s, 6)
    if seen.usage is not None:
        facts.update(prompt_tokens=seen.usage.num_prompt_tokens, cached_tokens=seen.usage.num_cached_tokens,
                     output_tokens=seen.usage.num_output_tokens)
    return facts
