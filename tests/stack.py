"""A real stack for tests: its own processes, ports and state folder.

    with RunningStack(tmp_path, prefill=1, decode=2, runner="mock-hash", max_num_seqs=8) as stack:
        httpx2.post(f"{stack.url}/v1/completions", ...)
        stack.kill("decode-0", signal.SIGKILL)
        stack.wait_healed("decode-0")

Names are those of the supervisor: prefill-0, decode-0, mixed-0, kvstore-0, router-0, tokenizer-0, gateway-0, nats,
valkey. Enter it in the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from stack.scrape import scrape
from stack.stack_process import StackProcess
from stack.state_file import ProcessState, StackState

MODEL = "SmolLM2-135M-Instruct"
_SMALL_STORE = {"kvstore_dram_bytes": 256 << 20, "kvstore_ssd_bytes": 128 << 20}  # the disk is taken at the start


def wait_gone(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that still run at the deadline. One that waits to be reaped has ended: process 1 may never reap it."""
    deadline = time.monotonic() + timeout_s
    while left := [process for process in processes if _runs(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class RunningStack:
    """Starts on entry; `flags` are those of `shoal up` (`max_num_seqs=8` → `--max-num-seqs 8`).

    `env` reaches every service, for settings without a flag of `shoal up`: `{"SHOAL_DECODE_MOCK_STEP_S": "0.01"}`.
    """

    def __init__(
        self, state_dir: Path, *, runner: str = "mock-hash", model: str | Path = MODEL,
        env: Mapping[str, str] | None = None, start_timeout_s: float = 120.0, **flags: str | int | float,
    ) -> None:
        asked = {"runner": runner, "model": str(model), **_SMALL_STORE, **flags}
        self._flags = [part for name, value in asked.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self._state_dir, self._env, self._start_timeout_s = state_dir / "stack", env, start_timeout_s
        self._process: StackProcess | None = None
        self._restarts_before: dict[str, int] = {}
        self._seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> Self:
        self._process = StackProcess(self._state_dir, self._flags, self._env)
        try:
            self.wait_ready(self._start_timeout_s)
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None,
                 _trace: TracebackType | None) -> None:
        self.stop()

    @property
    def process(self) -> StackProcess:
        assert self._process is not None, "the stack is not entered"
        return self._process

    @property
    def state(self) -> StackState:
        state = self.process.state()
        assert state is not None, f"the stack has ended:\n{self.process.printed()}"
        return state

    @property
    def url(self) -> str:
        return self.state.url

    @property
    def model(self) -> str:
        return self.state.model

    def service(self, name: str) -> ProcessState:
        return self.state.processes[name]

    def pid_of(self, name: str) -> int:
        pid = self.service(name).pid
        assert pid is not None, f"{name} does not run: {self.service(name)}"
        return pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal it; `wait_healed` then waits for the life after this one."""
        self._restarts_before[name] = self.service(name).restarts
        os.kill(self.pid_of(name), number)

    def kill_engine(self, name: str) -> None:
        """Kill the engine's own process of a worker; the worker then ends, and `wait_healed` waits for the next."""
        self._restarts_before[name] = self.service(name).restarts
        (engine,) = [child for child in psutil.Process(self.pid_of(name)).children()
                     if "engine.process" in child.cmdline()]
        engine.kill()

    def wait_ready(self, timeout_s: float = 120.0) -> StackState:
        state = self.process.wait_ready(timeout_s)
        self._note_processes()
        return state

    def wait_healed(self, name: str, timeout_s: float = 60.0) -> ProcessState:
        """Wait until the supervisor has started again what `kill` ended, and it is ready."""
        before = self._restarts_before[name]
        self._until(lambda: self.service(name).state == "ready" and self.service(name).restarts > before,
                    f"{name} did not heal", timeout_s)
        self._note_processes()
        return self.service(name)

    def metrics(self, name: str) -> dict[str, float]:
        """Sample name → value summed over labels."""
        service = self.service(name)
        return scrape(service.metrics_address or service.address)

    def log(self, name: str) -> str:
        return (Path(self.state.log_dir) / f"{name}.log").read_text(errors="replace")

    def stop(self, timeout_s: float = 60.0) -> None:
        """Drain and end; asserts exit code 0 and that no process of the stack is left. Again is harmless."""
        if self.process.returncode is not None:
            return
        self._note_processes()
        code = self.process.stop(timeout_s)
        left = wait_gone(list(self._seen.values()), timeout_s=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert not left, f"left behind: {left}"
        assert code == 0, f"shoal up ended with {code}:\n{self.process.printed()}"

    def _note_processes(self) -> None:
        """Remember all that run now, grandchildren too: what dies and is replaced is noted again later."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self._seen[process.pid] = process

    def _until(self, met: Callable[[], bool], otherwise: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not met():
            assert time.monotonic() < deadline, f"{otherwise} within {timeout_s:g} s:\n{self.process.printed()}"
            time.sleep(0.05)
