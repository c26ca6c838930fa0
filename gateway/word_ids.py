"""Bad words as token ids: tokenized once for all orders of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

AT_ONCE: Final = 16

Ids = tuple[int, ...]


class WordIds:
    """Of one call. Empty → filled by the first order that asks, while the others wait for it → read by all."""

    def __init__(self) -> None:
        self._known: dict[str, Ids] = {}
        self._filling = asyncio.Lock()

    async def of(self, texts: Sequence[str], tokenize: Callable[[str], Coroutine[Any, Any, Ids]]) -> list[Ids]:
        """Of each text. Raises what `tokenize` raises first; then no other call of it is left running."""
        async with self._filling:
            missing = [text for text in texts if text not in self._known]
            for first in range(0, len(missing), AT_ONCE):
                some = missing[first : first + AT_ONCE]
                try:
                    async with asyncio.TaskGroup() as group:
                        tasks = [group.create_task(tokenize(text)) for text in some]
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
                self._known.update(zip(some, (task.result() for task in tasks), strict=True))
        return [self._known[text] for text in texts]
