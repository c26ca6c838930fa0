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
    """Bounded concurrency without a queue: a request gets its slot now or is told when to come back."""

    def __init__(self, limit: int, retry_after_s: float) -> None:
        self._limit, self._retry_after_s = limit, retry_after_s
        self._running: set[Interruptible] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @contextmanager
    def slot(self) -> Iterator[Interruptible]:
        """Hold one slot. Raises `Overloaded` when all are taken and `Unavailable` while draining."""
        if self.draining:
            raise Unavailable("this gateway is shutting down", retry_after_s=self._retry_after_s)
        if len(self._running) >= self._limit:
            raise Overloaded(
                f"all {self._limit} request slots of this gateway are taken", retry_after_s=self._retry_after_s)
        work = Interruptible()
        self._running.add(work)
        self._idle.clear()
        metrics.IN_FLIGHT.set(len(self._running))
        try:
            yield work
        finally:
            self._running.discard(work)
            metrics.IN_FLIGHT.set(len(self._running))
            if not self._running:
                self._idle.set()

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
