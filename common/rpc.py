"""gRPC as all our services use it: errors with their facts, deadlines, request id and trace context.

Server side, a `ShoalError` raised by a handler ends the call with its gRPC status and its facts in trailing
metadata; anything else becomes `InternalError` and is logged. Client side, the same error is raised again;
`UNAVAILABLE` without facts is `Unavailable`, a passed deadline `DeadlineExceeded`. Stream handlers are async
generators.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Final, cast

import grpc
import grpc.aio

from common import logs, trace
from common.errors import (
    DeadlineExceeded,
    InternalError,
    ShoalError,
    Unavailable,
    from_wire,
)
from common.host_port import host_of
from common.metrics import counter, histogram
from common.service_token import TokenGuard, token_interceptors
from common.span import NO_SPAN, Span
from common.wire_security import PLAINTEXT, WireSecurity, is_loopback
from proto import common_pb2

log = logs.get(__name__)

ERROR_KEY: Final = "shoal-error-bin"
MAX_MESSAGE_BYTES: Final = 32 << 20
DEFAULT_TIMEOUT_S: Final = 10.0
CALL_S = histogram(
    "shoal_rpc_seconds", "time of an answered unary call, failed ones included",
    (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10), ["method"])
FAILED = counter("shoal_rpc_errors_total", "calls that ended in an error, by error code", ["method", "code"])
_SPANS: Final = {  # server spans of the calls that a request makes; all others only pass the trace on
    "Tokenize": "tokenize", "Route": "route", "Prefill": "prefill", "Lookup": "kv.lookup", "Get": "kv.get",
    "BeginPut": "kv.put",
}
_OPTIONS: Final = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS: Final = [*_OPTIONS, ("grpc.http2.min_ping_interval_without_data_ms", 5_000), ("grpc.so_reuseport", 0)]
_CHANNEL_OPTIONS: Final = [
    *_OPTIONS, ("grpc.initial_reconnect_backoff_ms", 100), ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def error_to_proto(error: ShoalError) -> common_pb2.ErrorDetail:
    return common_pb2.ErrorDetail(
        code=error.code, message=error.message, param=error.param, retry_after_s=error.retry_after_s)


def error_from_proto(detail: common_pb2.ErrorDetail) -> ShoalError:
    facts = {"code": detail.code, "message": detail.message}
    if detail.HasField("param"):
        facts["param"] = detail.param
    if detail.HasField("retry_after_s"):
        facts["retry_after_s"] = repr(detail.retry_after_s)
    return from_wire(facts)


def error_from_rpc(error: grpc.RpcError) -> ShoalError:
    """What a failed call means; facts in the trailing metadata win over the status."""
    for key, value in (error.trailing_metadata() or ()) if isinstance(error, grpc.aio.AioRpcError) else ():
        if key == ERROR_KEY and isinstance(value, bytes):
            return error_from_proto(common_pb2.ErrorDetail.FromString(value))
    status = error.code()
    detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"the call did not end within its deadline: {detail}")
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable(f"the service cannot be reached: {detail}", retry_after_s=1.0)
    if status == grpc.StatusCode.UNAUTHENTICATED:  # no fault of whoever asked us: another replica may take the call
        return Unavailable(f"the service refused this caller: {detail}", retry_after_s=1.0)
    return InternalError(f"{status.name}: {detail}")


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Adopts the caller's trace context and request id, and maps errors, around every handler."""

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method), handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method), handler.request_deserializer, handler.response_serializer)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.stream_unary, method), handler.request_deserializer, handler.response_serializer)
        if handler.stream_stream:
            return grpc.stream_stream_rpc_method_handler(
                _stream(handler.stream_stream, method), handler.request_deserializer, handler.response_serializer)
        return handler


def _received(context: grpc.aio.ServicerContext[Any, Any]) -> dict[str, str]:
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}


def _open_span(method: str) -> Span:
    """The span of a call, as the current one, where the caller's trace is recorded."""
    name = _SPANS.get(_short(method))
    span = trace.span(name, trace.SERVER) if name else NO_SPAN
    trace.stay_below(span)
    return span


def _short(method: str) -> str:
    """`Route` of `/shoal.Router/Route`: only methods that exist have a handler, so the set is closed."""
    return method.rpartition("/")[2]


async def _abort(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> None:
    if not isinstance(error, ShoalError):
        log.error("rpc_failed", method=method, exc_info=error)
        error = InternalError(f"{type(error).__name__} in {method}")
    FAILED.labels(_short(method), error.code).inc()
    await context.abort(
        getattr(grpc.StatusCode, error.grpc_status), error.message,
        ((ERROR_KEY, error_to_proto(error).SerializeToString()),))


def _unary(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    duration_s = CALL_S.labels(_short(method))

    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        trace.adopt(_received(context))
        span = _open_span(method)
        started = time.perf_counter()
        try:
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            span.fail(error)
            await _abort(context, method, error)
        except asyncio.CancelledError as error:
            span.fail(error)
            raise
        finally:
            span.finish()
            duration_s.observe(time.perf_counter() - started)

    return handle


def _stream(inner: Callable[..., AsyncIterator[Any]], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        # A call that is cut ends by closing this generator, from another task: it must close the inner one itself.
        trace.adopt(_received(context))
        span = _open_span(method)
        messages = inner(request, context)
        try:
            async for message in messages:
                yield message
        except grpc.aio.AbortError:
            raise
        except (asyncio.CancelledError, GeneratorExit) as error:
            span.fail(error)
            raise
        except Exception as error:
            span.fail(error)
            await _abort(context, method, error)
        finally:
            span.finish()
            await cast("AsyncGenerator[Any, None]", messages).aclose()

    return handle


class _UnaryClientInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        details = _with_context(client_call_details, client_call_details.timeout or DEFAULT_TIMEOUT_S)
        call = await continuation(details, request)
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error


class _ServerStreamClientInterceptor(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(_with_context(client_call_details, client_call_details.timeout), request)


class _StreamClientInterceptor(grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(_with_context(client_call_details, client_call_details.timeout), request_iterator)


def _with_context(details: Any, timeout: float | None) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *trace.carrier().items())
    return grpc.aio.ClientCallDetails(details.method, timeout, metadata, details.credentials, details.wait_for_ready)


_INTERCEPTORS: Final = [_UnaryClientInterceptor(), _ServerStreamClientInterceptor(), _StreamClientInterceptor()]


def open_channel(address: str, security: WireSecurity = PLAINTEXT) -> grpc.aio.Channel:
    """A channel to `host:port` with our interceptors; connects lazily. Unary calls get a default deadline.

    With a token and no CA it speaks TLS to other machines all the same, so that no call there gives the token away.
    """
    interceptors = [*_INTERCEPTORS, *(token_interceptors(security.tokens[0]) if security.tokens else ())]
    if not security.ca and (not security.tokens or security.insecure or is_loopback(host_of(address))):
        return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS, interceptors=interceptors)
    credentials, names = channel_credentials(security)
    return grpc.aio.secure_channel(
        address, credentials, options=[*_CHANNEL_OPTIONS, *names], interceptors=interceptors)


def channel_credentials(security: WireSecurity) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
    """For a channel with TLS (no CA: the system's), and the options that say which name the server must prove."""
    names = [("grpc.ssl_target_name_override", security.server_name)] if security.server_name else []
    return grpc.ssl_channel_credentials(security.ca or None, security.key or None, security.cert or None), names


def new_server(security: WireSecurity = PLAINTEXT) -> grpc.aio.Server:
    guard = [TokenGuard(security.tokens)] if security.tokens else []
    return grpc.aio.server(interceptors=[*guard, ServerInterceptor()], options=_SERVER_OPTIONS)


def bind(server: grpc.aio.Server, address: str, security: WireSecurity = PLAINTEXT) -> int:
    """The port of `host:port`, which 0 leaves to the system. Raises `RuntimeError` when it cannot be bound."""
    if not security.cert:
        return server.add_insecure_port(address)
    credentials = grpc.ssl_server_credentials(
        [(security.key, security.cert)], security.ca or None, require_client_auth=security.client_auth)
    return server.add_secure_port(address, credentials)
