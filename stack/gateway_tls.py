"""Whether the gateways of a stack speak HTTPS, as they will read it themselves from flags and environment."""

from __future__ import annotations

from collections.abc import Sequence

from common.wire_security import load_security
from gateway.config import GatewayConfig


def secured_gateway(
    host: str, flags: Sequence[str], *, insecure: bool = False, nats_url: str = "", redis_url: str = ""
) -> bool:
    """True for HTTPS. Raises `ConfigError`, before anything starts, for plaintext that is not allowed.

    An empty URL is that of a server of this machine.
    """
    given = {"--insecure": "true" if insecure else "", "--nats-url": nats_url, "--redis-url": redis_url}
    more = [f"{flag}={value}" for flag, value in given.items() if value]
    config = GatewayConfig.load(["--host", host, *flags, *more])
    load_security(config)
    return config.has_server_tls
