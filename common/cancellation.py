"""Whose cancellation a `CancelledError` is: that of the task, or of something it waited for (a channel that closed)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from common.errors import Unavailable

Answer = TypeVar("Answer")


def is_cancelled() -> bool:
    """The running task itself is to stop."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def cut_short(by: asyncio.CancelledError) -> Unavailable:
    """What a cancel that is not the task's own means, such as that of a call whose channel closes under it."""
    error = Unavailable("something that the request waited for was given up", retry_after_s=1.0)
    error.__cause__ = by
    return error


async def uncancelled(answer: Awaitable[Answer], peer: str) -> Answer:
    """A call that ended because its channel was closed looks cancelled: that is `Unavailable`."""
    try:
        return await answer
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise Unavailable(f"the channel to the {peer} was closed", retry_after_s=1.0) from None
