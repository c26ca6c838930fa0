"""One process of the stack, kept alive.

States: idle → starting → ready → down → starting → …; from every state → stopping → stopped. `starting` ends when
the gate lets it pass; a start that fails is `down`. Each `down` waits before the next start: doubling up to a cap,
and from the least again after `healthy_s` of being ready. A child has a process group of its own, so that nothing
it started outlives it, and a leash, so that it does not outlive the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import Unavailable
from stack.child_log import ChildLog
from stack.console import Console

_LEASH = Path(__file__).with_name("leash.py")
_ROOT = _LEASH.parent.parent  # children run here: no folder of the caller can shadow our packages
_GATE_POLL_S = 0.05
_UNREADY_STOP_S = 2.0
_REAP_S = 5.0  # from SIGKILL to gone


@dataclass(frozen=True, slots=True)
class Ready:
    """What a gate learned of a child that is ready; empty where it has nothing to say."""

    incarnation: str = ""
    address: str = ""
    metrics_address: str = ""


Gate = Callable[[float], Awaitable[Ready | None]]  # (unix time of the spawn) → None while not ready


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Back-off after the n-th death in a row: `least_s * 2**(n-1)`, at most `cap_s`."""

    least_s: float = 0.1
    cap_s: float = 10.0
    healthy_s: float = 60.0

    def delay_s(self, deaths: int) -> float:
        return float(min(self.least_s * 2 ** min(deaths - 1, 30), self.cap_s))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`rank` orders the stack: 0 starts first, higher ranks start together; the highest is stopped first."""

    name: str
    rank: int
    argv: tuple[str, ...]
    gate: Gate
    env: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 35.0


class Child:
    """`start` once, then `keep` in a task, then (the task cancelled) `stop`."""

    def __init__(
        self, spec: ChildSpec, log: ChildLog, console: Console, changed: Callable[[], None], policy: RestartPolicy,
    ) -> None:
        self.spec, self.log = spec, log
        self.state = "idle"
        self.restarts = 0
        self.ready = Ready()
        self._console, self._changed, self._policy = console, changed, policy
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        """Return when the gate has let it pass. Raises `Unavailable` with the reason and the last log lines."""
        spec = self.spec
        spawned_unix_s = time.time()
        output = await self.log.open()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", str(_LEASH), str(os.getpid()), *spec.argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **spec.env}, cwd=_ROOT, start_new_session=True)
        finally:
            os.close(output)
        self._enter("starting")
        exiting = asyncio.create_task(self._process.wait())
        passing = asyncio.create_task(self._pass_gate(spawned_unix_s))
        try:
            await asyncio.wait({exiting, passing}, timeout=spec.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if exiting.done():
                raise await self._failure(f"{spec.name} {_ended(exiting.result())} while starting")
            if not passing.done():
                raise await self._failure(f"{spec.name} was not ready within {spec.start_timeout_s:g} s")
            self.ready = passing.result()
        finally:
            exiting.cancel()
            passing.cancel()
        self._enter("ready")

    async def keep(self) -> None:
        """Start it again whenever it dies, until cancelled."""
        deaths = 0
        ready_at = time.monotonic()
        while True:
            assert self._process is not None
            code = await self._process.wait()
            lived_well = self.state == "ready" and time.monotonic() - ready_at > self._policy.healthy_s
            deaths = 1 if lived_well else deaths + 1
            delay_s = self._policy.delay_s(deaths)
            if self.state == "ready":
                self._console.say(f"{self.spec.name} {_ended(code)}; again in {delay_s:g} s", logging.WARNING)
            await self._reap()
            self._enter("down")
            await asyncio.sleep(delay_s)
            self.restarts += 1
            try:
                await self.start()
            except (Unavailable, OSError) as error:
                self._console.say(str(error), logging.ERROR)
                continue
            ready_at = time.monotonic()
            self._console.say(f"{self.spec.name} is back", logging.WARNING)

    async def stop(self) -> None:
        """SIGTERM, `stop_timeout_s` to drain, then SIGKILL to its whole group."""
        if self.pid is not None and self._process is not None:
            # One that was never ready has no work to drain.
            was_ready = self.state == "ready"
            limit_s = self.spec.stop_timeout_s if was_ready else min(self.spec.stop_timeout_s, _UNREADY_STOP_S)
            self._enter("stopping")
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(limit_s):
                    await self._process.wait()
            except TimeoutError:
                if was_ready:
                    self._console.say(f"{self.spec.name} did not drain within {limit_s:g} s: killed", logging.WARNING)
        await self._reap()
        self.log.close()
        self._enter("stopped")

    def kill(self) -> None:
        """SIGKILL to the group, at once; `stop` still reaps."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _pass_gate(self, spawned_unix_s: float) -> Ready:
        while True:
            ready = await self.spec.gate(spawned_unix_s)
            if ready is not None and (not ready.incarnation or ready.incarnation != self.ready.incarnation):
                return ready
            await asyncio.sleep(_GATE_POLL_S)

    async def _failure(self, reason: str) -> Unavailable:
        await self._reap()
        self._enter("down")
        tail = self.log.tail()
        return Unavailable(f"{reason}; its last lines (all in {self.log.path}):\n{tail}" if tail else reason)

    async def _reap(self) -> None:
        """Nothing of this life is left afterwards, and its output is read to the end."""
        self.kill()
        if self._process is not None:
            await asyncio.wait({asyncio.create_task(self._process.wait())}, timeout=_REAP_S)
        await self.log.finish(_REAP_S)

    def _enter(self, state: str) -> None:
        self.state = state
        self._changed()


def _ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
