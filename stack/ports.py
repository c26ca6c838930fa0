"""TCP ports of the one-host stack."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from common.errors import ConfigError, Unavailable

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15000
_TRIES = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind here now. Raises `ConfigError` when `host` is not an address of this machine."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r}: {error.strerror}", param="host") from None
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except PermissionError:
            raise ConfigError(f"port {port}: this user may not bind it", param="port") from None
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host {host!r} is not an address of this machine", param="host") from None
            return False
    return True


def free_port(host: str) -> int:
    """A free port below the kernel's ephemeral range.

    A server that restarts must find its port again: inside the range an outgoing connection, even a client's
    attempt to reconnect to that very server, could have taken it.
    """
    for _ in range(_TRIES):
        port = random.randrange(_LOWEST, _ephemeral_start())
        if is_free(host, port):
            return port
    raise Unavailable(f"no free port on {host} found in {_TRIES} tries")


def require_free(host: str, port: int) -> None:
    if not is_free(host, port):
        raise ConfigError(f"port {port} on {host} is taken: stop its owner or choose another with --port",
                          param="port")


def _ephemeral_start() -> int:
    try:
        start = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        start = 32768
    return start if start > _LOWEST + 1000 else 65536
