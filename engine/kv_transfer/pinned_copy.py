"""A copy that runs in a thread and touches blocks: whoever owns the blocks waits for it before giving them back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class PinnedCopies:
    """Runs copies one after another. A cancelled caller leaves its copy running; `settle` waits for it.

    Invariant: after `settle` returns and before the next `run`, no thread of ours touches a block.
    """

    def __init__(self) -> None:
        self._current: asyncio.Future[Any] | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self.begin(work))

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start one and go on; await it, shielded, before the next."""
        assert self._current is None or self._current.done()
        self._current = task = asyncio.ensure_future(work)
        return task

    async def run_thread(self, work: Callable[[], T]) -> T:
        return await self.run(asyncio.to_thread(work))

    async def settle(self) -> None:
        if self._current is not None:
            await wait_through(self._current)


async def wait_through(future: asyncio.Future[Any]) -> None:
    """Return when it is done, however often the caller is cancelled meanwhile; a cancellation is raised after that."""
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
