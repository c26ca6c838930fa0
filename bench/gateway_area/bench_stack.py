"""The stack that is measured here, and the load client beside it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from bench.gateway_area.client import Job, Result
from common.errors import InternalError
from stack.stack_process import StackProcess
from stack.state_file import StackState

NUM_STREAMS: Final = 256
_START_S: Final = 120.0
_NUM_BLOCKS: Final = 1 << 15  # the mock keeps 64 bytes of each
_JOB_S: Final = 180.0
_FLAGS: Final = {"runner": "mock-hash", "mixed": 1, "kvstore": 0, "max-num-seqs": NUM_STREAMS,
                 "max-num-batched-tokens": 8192}


class BenchStack:
    """A whole stack whose engine invents tokens, one each `step_s`."""

    def __init__(self, model_path: Path, *, step_s: float = 0.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True)
        flags = [part for name, value in {**_FLAGS, "model": model_path}.items() for part in (f"--{name}", str(value))]
        self._process = StackProcess(Path(self._folder.name), flags, {
            "SHOAL_DECODE_MOCK_STEP_S": str(step_s), "SHOAL_DECODE_NUM_BLOCKS": str(_NUM_BLOCKS)})

    def __enter__(self) -> BenchStack:
        try:
            self.state: StackState = self._process.wait_ready(_START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.stop()
        self._folder.cleanup()

    def pids(self, *services: str) -> dict[str, int]:
        """Of the first replica of each."""
        found = {service: self.state.processes[f"{service}-0"].pid for service in services}
        return {service: pid for service, pid in found.items() if pid is not None}


def ask(job: Job, env: Mapping[str, str] | None = None) -> Result:
    """The job done by a client in a process of its own. Raises `InternalError` when a request failed."""
    done = subprocess.run([sys.executable, "-m", "bench.gateway_area.client"], input=msgspec.json.encode(job),
                          stdout=subprocess.PIPE, timeout=_JOB_S, check=False, env=env)
    if done.returncode:
        raise InternalError(f"the load client ended with code {done.returncode}")
    result = msgspec.json.decode(done.stdout, type=Result)
    if result.failure:
        raise InternalError(f"the load client: {result.failure}")
    return result
