"""The shared token of a deployment on gRPC calls: sent by every client, checked by every server.

Health checks are open: they say nothing but whether a service serves, and probes hold no token. A refused call ends
with UNAUTHENTICATED before its handler sees anything of it. A token is never logged.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from common import logs
from common.metrics import counter

log = logs.get(__name__)

REFUSED = counter("shoal_rpc_unauthenticated_total", "calls refused for want of the service token", ["why"])
TOKEN_KEY: Final = "shoal-service-token"
_OPEN_PREFIX: Final = "/grpc.health.v1.Health/"
_NO_TOKEN: Final = "this service takes calls with a service token only, and the call has none: set service_token"
_WRONG_TOKEN: Final = "the service token of the call is not the one of this service: both must be set alike"


class TokenGuard(grpc.aio.ServerInterceptor):
    """Lets a call through when it carries one of `tokens`; each is compared in constant time."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = [token.encode() for token in tokens]

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        sent = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY)
        if sent is not None and self._knows(sent):
            return await continuation(handler_call_details)
        REFUSED.labels("none" if sent is None else "wrong").inc()
        log.debug("call_refused", method=handler_call_details.method, token="none" if sent is None else "wrong")
        return _refusal(_NO_TOKEN if sent is None else _WRONG_TOKEN)

    def _knows(self, sent: str | bytes) -> bool:
        given = sent if isinstance(sent, bytes) else sent.encode()
        return sum(hmac.compare_digest(given, token) for token in self._tokens) > 0  # all, whichever fits


def _refusal(why: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Fits calls of every kind: it reads nothing and answers only a status."""

    async def refuse(_messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)


def token_interceptors(token: str) -> list[grpc.aio.ClientInterceptor]:
    """What puts the token on every call of a channel; a class takes part in one kind of call only."""
    return [kind(token) for kind in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]


class _Sender:
    def __init__(self, token: str) -> None:
        self._token = token

    def _signed(self, details: Any) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), (TOKEN_KEY, self._token))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)


class _UnaryUnary(_Sender, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._signed(client_call_details), request)


class _UnaryStream(_Sender, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._signed(client_call_details), request)


class _StreamUnary(_Sender, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._signed(client_call_details), request_iterator)


class _StreamStream(_Sender, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._signed(client_call_details), request_iterator)
