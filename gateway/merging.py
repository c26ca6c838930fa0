"""Several streams read as one.

States of a stream: waiting (for one of `at_once` places) → read in a task of its own → ended. The first error of any
ends all. At most `_MAX_UNREAD` items wait for the reader; then the streams wait, and with them whatever feeds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, TypeVar

from common.cancellation import cut_short, is_cancelled

Item = TypeVar("Item")

_MAX_UNREAD: Final = 64


class _End:
    """A stream has ended: well, or by `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def merged(streams: Sequence[AsyncGenerator[Item, None]], at_once: int) -> AsyncGenerator[Item, None]:
    """Items as they come; those of one stream in their order. Raises the first error of a stream.

    Leaving early cancels what is being read and closes it.
    """
    unread: asyncio.Queue[Item | _End] = asyncio.Queue(_MAX_UNREAD)
    places = asyncio.Semaphore(at_once)
    tasks = [asyncio.create_task(_read(stream, places, unread)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            item = await unread.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(
    stream: AsyncGenerator[Item, None], places: asyncio.Semaphore, unread: asyncio.Queue[Item | _End]
) -> None:
    try:
        async with places, aclosing(stream):
            async for item in stream:
                await unread.put(item)
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        await unread.put(_End(cut_short(error)))
    except Exception as error:
        await unread.put(_End(error))
    else:
        await unread.put(_End())
