"""Whether the gateways of a stack speak HTTPS, as they will read it themselves from flags and environment."""

from __future__ import annotations

from collections.abc import Sequence

from common.wire_security import load_security
from gateway.config import GatewayConfig


def secured_gateway(host: str, flags: Sequence[str]) -> bool:
    """True for HTTPS. Raises `ConfigError` for a host that may not be served in plaintext, before anything starts."""
    config = GatewayConfig.load(["--host", host, *flags])
    load_security(config)
    return config.has_server_tls
