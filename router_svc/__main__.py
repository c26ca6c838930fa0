"""`python -m router_svc`: one router replica."""

from __future__ import annotations

from common.service_host import run
from router_svc.config import RouterConfig
from router_svc.service import build

if __name__ == "__main__":
    run(RouterConfig, build)
