"""URLs of NATS and Redis: what they say of credentials and TLS, and how they are shown without secrets."""

from __future__ import annotations

import importlib.util
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis.asyncio as redis
from nats.aio.client import Client
from nats.errors import Error as NatsError

from common.errors import ConfigError

_USER_INFO = re.compile(r"://\S*@")  # to the last @: a password may hold one
_SECRET_QUERY = re.compile(r"([?&](?:password|username|token)=)[^&\s]*")


def masked(text: str) -> str:
    """`text` with the credentials of each URL in it replaced by ***."""
    return _SECRET_QUERY.sub(r"\1***", _USER_INFO.sub("://***@", text))


def open_redis(url: str, ca: str = "", **options: Any) -> redis.Redis:
    """A client that connects lazily; `rediss://` is verified with the PEM file `ca` (empty: the system's CAs).

    Raises `ConfigError` for what is no such URL, without showing it.
    """
    if url.startswith("rediss://") and ca and "ssl_ca_certs=" not in url:
        options["ssl_ca_certs"] = ca
    try:
        return redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"redis_url: {masked(str(error))}", param="redis_url") from None


@dataclass(frozen=True, slots=True)
class NatsServer:
    """A NATS URL taken apart. `user` alone is a token; `creds` is a file with a JWT and its seed."""

    address: str  # scheme://host:port, without credentials
    user: str
    password: str | None
    creds: str
    tls: bool

    @staticmethod
    def parse(url: str) -> NatsServer:
        """Raises `ConfigError`, without showing the URL."""
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            host, port = parts.hostname, parts.port or 4222
        except ValueError:
            raise ConfigError("nats_url: not a URL", param="nats_url") from None
        query = parse_qs(parts.query)
        if parts.scheme not in ("nats", "tls") or not host or query.keys() - {"creds"}:
            raise ConfigError("nats_url: must be nats:// or tls://[user:password@]HOST[:PORT][?creds=FILE]",
                              param="nats_url")
        password = None if parts.password is None else unquote(parts.password)
        shown = f"[{host}]" if ":" in host else host
        return NatsServer(f"{parts.scheme}://{shown}:{port}", unquote(parts.username or ""), password,
                          query.get("creds", [""])[0], parts.scheme == "tls")

    def options(self, client: Client, ca: str = "") -> dict[str, Any]:
        """Arguments of `client.connect`. Raises `ConfigError` for a file that cannot be used."""
        options: dict[str, Any] = {"servers": [self.address]}
        if self.tls or ca:
            options["tls"] = _tls_context(ca)
        if self.creds:
            options["user_credentials"] = _creds_file(self.creds)
        elif self.password is not None:
            options |= {"user": self.user, "password": self._guarded(client, self.password)}
        elif self.user:
            options["token"] = self._guarded(client, self.user)
        return options

    def _guarded(self, client: Client, secret: str) -> Callable[[], str]:
        """Given out only over TLS where the URL asks for TLS: the client itself would take plaintext as well."""

        def give() -> str:
            if self.tls and not offers_tls(client):
                raise NatsError("the server offers no TLS, and the URL asks for it")
            return secret

        return give


def offers_tls(client: Client) -> bool:
    """Whether the server that the client talks to has TLS."""
    return bool(client._server_info.get("tls_required"))


def _tls_context(ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise ConfigError(f"servers_ca={ca!r}: {error.strerror or error}", param="servers_ca") from None


def _creds_file(path: str) -> str:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"nats_url: creds file {path!r}: {error.strerror}", param="nats_url") from None
    if importlib.util.find_spec("nkeys") is None:
        raise ConfigError("nats_url: a creds file needs the package nkeys: pip install 'shoal[nats-creds]'",
                          param="nats_url")
    return path
