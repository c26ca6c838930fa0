"""The address at which other services reach this one."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from common.config import ServiceConfig
from common.errors import ConfigError

_REDIS_PORT: Final = 6379


def advertised_host(config: ServiceConfig) -> str:
    """`advertise_host`, else `host`; where that means all addresses, the one from which this machine reaches Redis.

    So a container, whose address nobody knows beforehand, needs no setting. Raises `ConfigError` when there is none.
    """
    if config.advertise_host:
        return config.advertise_host
    return _address_towards(config.redis_url) if is_wildcard(config.host) else config.host


def is_wildcard(host: str) -> bool:
    """Whether a server bound here listens on all addresses."""
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _address_towards(url: str) -> str:
    """The source address of a datagram to this server; none is sent."""
    try:
        parts = urlsplit(url)
        family, _, _, _, address = socket.getaddrinfo(
            parts.hostname or "127.0.0.1", parts.port or _REDIS_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            found = str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"advertise_host: with all addresses bound, name the one that others reach ({error})",
                          param="advertise_host") from None
    return found
