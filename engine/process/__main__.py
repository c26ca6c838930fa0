"""`python -m engine.process SOCKET MEMORY`: started by `EngineProcess` alone, with two open file descriptors."""

from __future__ import annotations

import sys

from engine.process.child import run

if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]))
