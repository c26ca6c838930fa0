"""The stack a command works on: the one that is named, the one that runs here, or one of its own for the while."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stack.api_client import gateway_url, running_stack
from stack.model_progress import ensure_model
from stack.stack_process import StackProcess
from stack.state_file import StackState

_START_TIMEOUT_S = 120.0
_SSD_BYTES = 256 << 20  # of the stack that it starts itself


@contextmanager
def running_or_own_stack(url: str, state_dir: Path | None) -> Iterator[tuple[str, StackState | None]]:
    """(URL without `/v1`, state); the state is None for a gateway that is not of this machine's stack."""
    state = running_stack(state_dir)
    if url or state is not None:
        at = gateway_url(url, state_dir)
        yield at, state if state is not None and state.url == at else None
        return
    ensure_model("SmolLM2-135M-Instruct")
    with tempfile.TemporaryDirectory(prefix="shoal-stack-", ignore_cleanup_errors=True) as folder:
        began = time.monotonic()
        process = StackProcess(Path(folder), ["--kvstore-ssd-bytes", str(_SSD_BYTES)])
        try:
            state = process.wait_ready(_START_TIMEOUT_S)
            print(f"✓ stack started ({time.monotonic() - began:.1f} s)", flush=True)
            yield state.url, state
        finally:
            code = process.stop()
            print(f"{'✓' if code == 0 else '✗'} stack stopped (exit code {code})", flush=True)
