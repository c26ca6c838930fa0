"""`python -m tokenizer_svc`: one tokenizer replica."""

from __future__ import annotations

from common.service_host import run
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.service import build

if __name__ == "__main__":
    run(TokenizerConfig, build)
