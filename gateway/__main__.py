"""`python -m gateway`: one gateway."""

from __future__ import annotations

from common.service_host import run
from gateway.config import GatewayConfig
from gateway.service import build

if __name__ == "__main__":
    run(GatewayConfig, build)
