"""`python -m kvstore_svc`: one store node."""

from __future__ import annotations

from common.service_host import run
from kvstore_svc.config import KvStoreConfig
from kvstore_svc.service import build

if __name__ == "__main__":
    run(KvStoreConfig, build)
