"""Ends one request's work early, with an error that says why.

States: running → interrupted → left, or running → left. `interrupt` cancels the task that is inside the `async with`
body; the cancellation leaves the block as the error that was given, so that cleaning up happens once, on the way out.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from common.errors import Cancelled, DeadlineExceeded, ShoalError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive


class Interruptible:
    """A block that may be ended from outside. The first reason wins; after the block it does nothing."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None
        self._error: ShoalError | None = None

    def interrupt(self, error: ShoalError) -> None:
        if self._error is None:
            self._error = error
            if self._task is not None:
                self._task.cancel()

    async def __aenter__(self) -> Interruptible:
        if self._error is not None:
            raise self._error
        self._task = asyncio.current_task()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        others = task.uncancel()  # our cancel() has been delivered: it always finds the task in an await of the body
        if not others and (kind is None or not issubclass(kind, Exception)):
            raise self._error from None


@asynccontextmanager
async def interrupted_on_disconnect(work: Interruptible, receive: Receive) -> AsyncIterator[None]:
    """While inside, a client that goes away interrupts `work` at once. The request's body has been read."""
    watching = asyncio.create_task(_watch(work, receive))
    try:
        yield
    finally:
        watching.cancel()


async def _watch(work: Interruptible, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    work.interrupt(Cancelled("the client went away"))


@asynccontextmanager
async def deadline(at: float, allowed_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Raise `DeadlineExceeded` at loop time `at`; the yielded timeout can be moved with `reschedule`."""
    timeout = asyncio.timeout_at(at)
    try:
        async with timeout:
            yield timeout
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineExceeded(f"the request did not finish within its deadline of {allowed_s:g} s") from None
