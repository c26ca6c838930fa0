"""`python -m prefill_svc`: one prefill worker."""

from __future__ import annotations

from common.service_host import run
from prefill_svc.config import PrefillConfig
from prefill_svc.service import build

if __name__ == "__main__":
    run(PrefillConfig, build)
