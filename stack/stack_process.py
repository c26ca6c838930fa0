"""A stack as a process of its own, for a command or a test that needs one.

States: new → starting → ready → stopped. It is leashed to the thread that starts it, so that it does not outlive a
caller that is killed: start it from the main thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.errors import NotFound, Unavailable
from stack.state_file import StackState, find_stack

_HERE = Path(__file__).parent
_POLL_S = 0.05


class StackProcess:
    """`python -m stack up` with `state_dir`; what it prints is in `state_dir/up.log`."""

    def __init__(self, state_dir: Path, flags: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        assert threading.current_thread() is threading.main_thread()
        state_dir.mkdir(parents=True, exist_ok=True)
        self.state_dir, self.log_path = state_dir, state_dir / "up.log"
        command = [sys.executable, "-I", "-S", str(_HERE / "leash.py"), str(os.getpid()),
                   sys.executable, "-m", "stack", "up", "--state-dir", str(state_dir), "--port", "0", *flags]
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           cwd=_HERE.parent, env={**os.environ, **(env or {})})

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.poll()

    def state(self) -> StackState | None:
        """What it says of itself; None before it has claimed its folder and after it has ended."""
        try:
            state = find_stack(self.state_dir)
        except NotFound:
            return None
        return state if state.pid == self.pid else None

    def wait_ready(self, timeout_s: float = 120.0) -> StackState:
        """Raises `Unavailable`, with what it printed, when it ends or is not ready in time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.state()
            if state is not None and state.state == "ready":
                return state
            if self.returncode is not None:
                raise Unavailable(f"the stack ended with code {self.returncode}:\n{self.printed()}")
            time.sleep(_POLL_S)
        raise Unavailable(f"the stack was not ready within {timeout_s:g} s:\n{self.printed()}")

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM and wait; past the limit SIGKILL, which its children do not survive. Returns the exit code."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait(10)

    def printed(self) -> str:
        return self.log_path.read_text(errors="replace")[-20_000:]
