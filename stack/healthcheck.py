"""`shoal healthcheck`: one question to one service, for the health checks of containers; loads as little as it can."""

from __future__ import annotations

import http.client
import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from common.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    import grpc

_SERVING: Final = 1
_METHOD: Final = "/grpc.health.v1.Health/Check"


def check(grpc_address: str, url: str, service: str, timeout_s: float) -> None:
    """Return when the service takes work. Raises `Unavailable` when not, `ConfigError` unless one target is given."""
    if bool(grpc_address) == bool(url):
        raise ConfigError("give either --grpc HOST:PORT or --http URL", param="grpc")
    if url:
        _check_http(url, timeout_s)
    else:
        _check_grpc(grpc_address, service, timeout_s)


def _check_grpc(address: str, service: str, timeout_s: float) -> None:
    import grpc
    from grpc_health.v1 import health_pb2

    with _channel(address) as channel:
        ask = channel.unary_unary(
            _METHOD, request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString)
        try:
            status = ask(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s).status
        except grpc.RpcError as error:
            raise Unavailable(f"{address}: {error.code().name} {error.details()}") from None
    if status != _SERVING:
        raise Unavailable(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")


def _channel(address: str) -> grpc.Channel:
    """With TLS where this container's services have it; the token is not needed."""
    import grpc

    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if not any(name.endswith("_TLS_CA") for name in os.environ):
        return grpc.insecure_channel(address, options=options)
    from common.config import ServiceConfig
    from common.rpc import channel_credentials
    from common.wire_security import load_security

    security = load_security(ServiceConfig.load([]))
    credentials, names = channel_credentials(security)
    return grpc.secure_channel(address, credentials, options=[*options, *names])


def _check_http(url: str, timeout_s: float) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--http must be an http or https URL, got {url!r}", param="http")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        connection.request("GET", parts.path or "/")
        status = connection.getresponse().status
        connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"{url}: {type(error).__name__} {error}") from None
    if status != 200:
        raise Unavailable(f"{url}: status {status}")
