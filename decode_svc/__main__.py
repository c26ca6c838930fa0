"""`python -m decode_svc`: one decode worker."""

from __future__ import annotations

from common.service_host import run
from decode_svc.config import DecodeConfig
from decode_svc.service import build

if __name__ == "__main__":
    run(DecodeConfig, build)
