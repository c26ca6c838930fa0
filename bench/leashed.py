"""A process that a measurement needs. It does not outlive this one, and what it says goes into a log of its own.

States: started → stopped. Start it from the main thread: the leash is tied to the thread.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import stack.leash
from common.errors import Unavailable

_LEASH = Path(stack.leash.__file__)
_STOP_S = 15.0
_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}


class Leashed:
    """One child; `ask` talks to it in lines."""

    def __init__(self, process: Process, log: Path) -> None:
        self._process, self._log = process, log

    @classmethod
    async def start(cls, argv: Sequence[str], log: Path, *, talks: bool = False) -> Self:
        """`talks`: its stdout is what `ask` reads; else it goes into the log with stderr."""
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *argv, stdin=PIPE if talks else DEVNULL,
                stdout=PIPE if talks else output, stderr=output, cwd=_LEASH.parent.parent,
                env={**os.environ, **_ENV})
        return cls(process, log)

    async def ask(self, line: str, timeout_s: float = 60.0) -> str:
        """Its next line after this one; an empty one is only waited for. Raises `Unavailable` when it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(timeout_s):
            answer = (await self._process.stdout.readline()).decode().strip()
        if not answer:
            raise Unavailable(f"a process of the measurement ended:\n{self._log.read_text()[-2000:]}")
        return answer

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(_STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
