"""How many requests are in work at once, and how they end when the gateway does.

States: open → draining (no new work; what runs goes on) → cut (what still runs is interrupted with an error).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import Overloaded, ShoalError, Unavailable
from gateway import metrics
from gateway.interruption import Interruptible


class Admission:
    """Bounded concurrency without a queue: a request gets its slots now or is told when to come back."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        self._limit, self._retry_after_s = limit, retry_after_s
        self._running: dict[Interruptible, int] = {}  # → how many slots it holds
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _num_taken(self) -> int:
        return sum(self._running.values())

    @contextmanager
    def slot(self) -> Iterator[Interruptible]:
        """Hold one slot. Raises `Overloaded` when all are taken and `Unavailable` while draining."""
        if self.draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=self._retry_after_s)
        if self._num_taken >= self._limit:
            raise Overloaded(
                f"all {self._limit} request slots of this gateway are taken", retry_after_s=self._retry_after_s)
        work = Interruptible()
        self._running[work] = 1
        self._idle.clear()
        metrics.IN_FLIGHT.set(len(self._running))
        try:
            yield work
        finally:
            del self._running[work]
            metrics.IN_FLIGHT.set(len(self._running))
            if not self._running:
                self._idle.set()

    def widen(self, work: Interruptible, num_choices: int) -> None:
        """Hold a slot for each choice of the request, at most all there are. Raises `Overloaded` without room."""
        wanted = min(num_choices, self._limit)
        num_free = self._limit - self._num_taken + self._running[work]
        if wanted > num_free:
            raise Overloaded(
                f"{num_choices} choices take {wanted} of the {self._limit} request slots of this gateway; {num_free} "
                f"are free", retry_after_s=self._retry_after_s)
        self._running[work] = wanted

    def start_drain(self) -> None:
        self.draining = True

    async def idle(self) -> None:
        """Return when nothing is in work. The caller bounds the wait."""
        await self._idle.wait()

    def cut(self, error: ShoalError) -> None:
        """Interrupt all that runs; each request answers with `error`."""
        self.draining = True
        for work in list(self._running):
            work.interrupt(error)
