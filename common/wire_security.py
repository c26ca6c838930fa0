"""How services trust each other on the wire: TLS files, and a token that every call carries. Loopback needs neither.

A service that is told to bind another address in plaintext, or to reach NATS or Redis there in plaintext, does not
start, unless `insecure` allows it; without it the token goes over TLS to any other address. Three ports
count: gRPC (`tls_cert`), the gateway's HTTP (`tls_cert` or `ssl_certfile`) and Prometheus, which holds numbers only and
is allowed where `metrics_host` names its address. Files are read once, at the start.
"""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from common.advertise import advertised_host, is_wildcard
from common.config import ServiceConfig
from common.errors import ConfigError
from common.host_port import host_port

MIN_TOKEN_CHARS = 16


@dataclass(frozen=True, slots=True)
class WireSecurity:
    """PEM bytes and tokens of one process. With `ca` its channels use TLS; with `cert` and `key` its gRPC port does."""

    ca: bytes = field(default=b"", repr=False)
    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    client_auth: bool = False  # callers must show a certificate of `ca`
    server_name: str = ""  # what certificates of services are checked for; empty: the address that is called
    tokens: tuple[str, ...] = field(default=(), repr=False)  # the first is sent, each is accepted
    insecure: bool = False  # the token may go to other machines in plaintext


PLAINTEXT = WireSecurity()


def load_security(config: ServiceConfig) -> WireSecurity:
    """Raises `ConfigError` for a port in plaintext beyond loopback and for files that cannot be used."""
    _refuse_exposed(config)
    _check_pairs(config)
    if config.tls_cert:
        _check_pair(config.tls_cert, config.tls_key, "tls_cert")
    if config.tls_ca:
        _check_ca(config.tls_ca)
    return WireSecurity(
        ca=_read(config.tls_ca, "tls_ca"), cert=_read(config.tls_cert, "tls_cert"),
        key=_read(config.tls_key, "tls_key"), client_auth=config.tls_client_auth, server_name=config.tls_server_name,
        tokens=_load_tokens(config.service_token, config.service_token_file), insecure=config.insecure)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound here. Names other than localhost count as outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def metrics_host(config: ServiceConfig) -> str:
    """Where the Prometheus port is bound."""
    return config.metrics_host or config.host


def metrics_address(config: ServiceConfig, port: int) -> str:
    """Where others scrape it: `host:port`."""
    host = metrics_host(config)
    if is_wildcard(host):
        host = advertised_host(config)
    elif not is_loopback(host):
        host = config.advertise_host or host
    return host_port(host, port)


def _refuse_exposed(config: ServiceConfig) -> None:
    if config.insecure:
        return
    if not is_loopback(config.host) and not config.has_server_tls:
        raise ConfigError(
            f"host={config.host!r}: not a loopback address, and there is no TLS: set {config.tls_fields}, "
            "or allow plaintext with --insecure", param="host")
    if not config.metrics_host and not is_loopback(config.host):
        raise ConfigError(
            f"metrics_host: the Prometheus port speaks plaintext; name the address it may be bound to with "
            f"--metrics-host (with --metrics-host {config.host} it goes where the service is), or use --insecure",
            param="metrics_host")
    for name, url, plain, secure in (("nats_url", config.nats_url, "nats", "tls"),
                                     ("redis_url", config.redis_url, "redis", "rediss")):
        if (host := _plaintext_host(url, plain)) and not is_loopback(host):
            raise ConfigError(f"{name}: {plain}://{host} speaks plaintext beyond this machine: use {secure}://, "
                              "or allow it with --insecure", param=name)


def _plaintext_host(url: str, plain: str) -> str:
    """The host of a URL of this scheme, or of none; empty for another scheme and for what is no URL."""
    try:
        parts = urlsplit(url if "://" in url else f"{plain}://{url}")
    except ValueError:
        return ""  # whoever connects says so
    return (parts.hostname or "") if parts.scheme == plain else ""


def _check_pairs(config: ServiceConfig) -> None:
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("tls_cert and tls_key: one does not work without the other", param="tls_key")
    if config.tls_cert and not config.tls_ca and config.serves_grpc:
        raise ConfigError("tls_ca: needed with tls_cert, to know the other services by", param="tls_ca")
    if config.tls_client_auth and not config.tls_ca:
        raise ConfigError("tls_client_auth: needs tls_ca, to know the callers by", param="tls_client_auth")
    if config.service_token and config.service_token_file:
        raise ConfigError("service_token and service_token_file: only one may be set", param="service_token")


def check_http_pair(cert: str, key: str, name: str) -> None:
    """Raises `ConfigError` unless certificate and key belong together."""
    _check_pair(cert, key, name)


def _check_pair(cert: str, key: str, name: str) -> None:
    _read(cert, name)
    _read(key, name.replace("cert", "key"))
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key or None, password=_no_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigError(f"{name}={cert!r}: does not work with key {key!r}: {error}", param=name) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; it must not be")


def _check_ca(path: str) -> None:
    _read(path, "tls_ca")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:
        raise ConfigError(f"tls_ca={path!r}: holds no certificate: {error}", param="tls_ca") from None


def _read(path: str, name: str) -> bytes:
    if not path:
        return b""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path!r}: {error.strerror}", param=name) from None


def _load_tokens(token: str, file: str) -> tuple[str, ...]:
    lines = [token] if token else _read(file, "service_token_file").decode("utf-8", "replace").splitlines()
    tokens = tuple(dict.fromkeys(line.strip() for line in lines if line.strip() and not line.startswith("#")))
    if file and not tokens:
        raise ConfigError(f"service_token_file={file!r}: holds no token", param="service_token_file")
    for each in tokens:
        if len(each) < MIN_TOKEN_CHARS or not each.isascii() or not each.isprintable() or " " in each:
            raise ConfigError(f"service_token: a token must have at least {MIN_TOKEN_CHARS} printable ASCII characters "
                              "and no space", param="service_token")
    return tokens
