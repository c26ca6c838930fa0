"""`shoal healthcheck`: one question to one service, for the health checks of containers; loads as little as it can."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit

from common.errors import ConfigError, Unavailable
from common.host_port import host_port

if TYPE_CHECKING:
    import grpc

_SERVING: Final = 1
_METHOD: Final = "/grpc.health.v1.Health/Check"


def check(grpc_address: str, url: str, service: str, timeout_s: float, tls: bool | None = None) -> None:
    """Return when the service takes work. Raises `Unavailable` when not, `ConfigError` unless one target is given.

    `tls` says whether the gRPC port speaks TLS; None: where the environment names a CA, unless it is the health port.
    """
    if bool(grpc_address) == bool(url):
        raise ConfigError("give either --grpc HOST:PORT or --http URL", param="grpc")
    if url:
        _check_http(url, timeout_s)
    else:
        _check_grpc(grpc_address, service, timeout_s, _speaks_tls(grpc_address, os.environ) if tls is None else tls)


def _speaks_tls(address: str, environ: Mapping[str, str]) -> bool:
    return bool(_setting(environ, "TLS_CA")) and address.rpartition(":")[2] != _setting(environ, "HEALTH_PORT")


def _setting(environ: Mapping[str, str], field: str) -> str:
    """A field of the service in this container, whichever it is: its own variable, then that of all."""
    own = [value for name, value in environ.items() if name.startswith("SHOAL_") and name.endswith(f"_{field}")
           and name != f"SHOAL_{field}"]
    return next(iter(own), environ.get(f"SHOAL_{field}", ""))


def _check_grpc(address: str, service: str, timeout_s: float, tls: bool) -> None:
    import grpc
    from grpc_health.v1 import health_pb2

    with _channel(address, tls) as channel:
        ask = channel.unary_unary(
            _METHOD, request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString)
        try:
            status = ask(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s).status
        except grpc.RpcError as error:
            raise Unavailable(f"{address}: {error.code().name} {error.details()}") from None
    if status != _SERVING:
        raise Unavailable(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")


def _channel(address: str, tls: bool) -> grpc.Channel:
    """Verified by the CA and the server name of the environment, with its certificate; the token is not needed."""
    import grpc

    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if not tls:
        return grpc.insecure_channel(address, options=options)
    if name := _setting(os.environ, "TLS_SERVER_NAME"):
        options.append(("grpc.ssl_target_name_override", name))
    ca, key, cert = (_pem(_setting(os.environ, field)) for field in ("TLS_CA", "TLS_KEY", "TLS_CERT"))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def _pem(path: str) -> bytes | None:
    try:
        return Path(path).read_bytes() if path else None
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from None


def _check_http(url: str, timeout_s: float) -> None:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"--http: {error}, got {url!r}", param="http") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii() or " " in url:
        raise ConfigError(f"--http must be an http or https URL, got {url!r}", param="http")
    try:
        status = asyncio.run(_status(parts, port, timeout_s))
    except (OSError, ValueError, IndexError) as error:  # a passed deadline is an OSError
        raise Unavailable(f"{url}: {type(error).__name__} {error}") from None
    if status != 200:
        raise Unavailable(f"{url}: status {status}")


async def _status(parts: SplitResult, port: int, timeout_s: float) -> int:
    """No certificate is checked: nothing secret is asked, and it may be one for another name than this container's."""
    context = ssl._create_unverified_context() if parts.scheme == "https" else None
    host = parts.hostname or ""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        try:
            head = f"GET {target} HTTP/1.1\r\nHost: {host_port(host, port)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            return int((await reader.readline()).split()[1])
        finally:
            writer.transport.abort()
