"""The span of one HTTP request, root of all that is done for it.

Names and attributes are those of OpenTelemetry's conventions for generative AI (semantic-conventions-genai) and HTTP.
What a client wrote and what it was answered is never in a trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import Scope

from common import trace
from common.span import NO_SPAN, Attributes, Span, Value
from gateway.genai_metrics import OPERATIONS, PROVIDER
from gateway.order import Order

if TYPE_CHECKING:
    from gateway.observation import Observation


def open_span(scope: Scope, *, wanted: bool) -> Span:
    """Begun when the request is received, under the caller's trace if it sent one."""
    return trace.root(scope["method"], trace.SERVER) if wanted else NO_SPAN


def close_span(span: Span, seen: Observation, scope: Scope, route: str, status: int) -> None:
    """Say how it went; the span ends with its block."""
    if not span.recording:
        return
    operation = OPERATIONS.get(route)
    span.rename(f"{operation} {seen.model}" if operation else f"{scope['method']} {route}")
    span.put({"http.request.method": scope["method"], "http.route": route, "http.response.status_code": status})
    if scope.get("server"):
        host, port = scope["server"]
        span.put({"server.address": host, "server.port": port or 0})
    if operation:
        span.put({"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER,
                  "gen_ai.request.model": seen.model, "gen_ai.request.stream": seen.streams,
                  "shoal.client_request_id": seen.client_id})
        span.put(_asked(seen.order) if seen.order is not None else {})
        span.put(_answered(seen))
    if seen.error is not None:
        span.fail(seen.error)


def _asked(order: Order) -> Attributes:
    asked: dict[str, Value] = {
        "gen_ai.request.temperature": order.temperature, "gen_ai.request.top_p": order.top_p}
    if order.n > 1:
        asked["gen_ai.request.choice.count"] = order.n
    if order.top_k:
        asked["gen_ai.request.top_k"] = order.top_k
    if order.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = order.max_tokens
    return asked


def _answered(seen: Observation) -> Attributes:
    answered: dict[str, Value] = {}
    if seen.status == 200:
        answered["gen_ai.response.id"] = seen.request_id
        answered["gen_ai.response.model"] = seen.model
    if seen.finish_reasons:
        answered["gen_ai.response.finish_reasons"] = seen.finish_reasons
    if seen.first_content_s is not None:
        answered["gen_ai.response.time_to_first_chunk"] = seen.first_content_s
    if seen.usage is not None:
        answered["gen_ai.usage.input_tokens"] = seen.usage.num_prompt_tokens
        answered["gen_ai.usage.output_tokens"] = seen.usage.num_output_tokens
        answered["gen_ai.usage.cache_read.input_tokens"] = seen.usage.num_cached_tokens
    return answered
