"""Choices of one order side by side: the deltas of a generation dealt out, the events of its choices merged.

One task reads the worker and hands each delta to its choice, so that a choice that waits for its text holds up no
other. Unread deltas wait for their choices; when they are too many, the worker is not read until there is room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

from common.cancellation import cut_short, is_cancelled
from common.errors import InternalError
from common.generation import TokenDelta
from gateway.attempts import Attempts
from gateway.choice_text import ChoiceText, OrderFacts
from gateway.merging import merged
from gateway.order import Ending, Piece

_MAX_UNREAD: Final = 1 << 16  # tokens, logprobs and their alternatives together; some 6 MB


def events_of(
    choices: Sequence[ChoiceText], facts: OrderFacts, attempts: Attempts
) -> AsyncGenerator[Piece | Ending, None]:
    """Until each choice has had its ending."""
    if len(choices) == 1:
        return choices[0].events(attempts.deltas())
    return _events_of_several(choices, facts, attempts)


async def _events_of_several(
    choices: Sequence[ChoiceText], facts: OrderFacts, attempts: Attempts
) -> AsyncGenerator[Piece | Ending, None]:
    unread = _Unread(len(choices))
    streams = [choice.events(unread.read(index)) for index, choice in enumerate(choices)]
    async with aclosing(merged(streams, len(streams))) as events, _dealing(attempts, facts, unread):
        async for event in events:
            if isinstance(event, Ending):
                attempts.drop(event.choice)
            yield event


@asynccontextmanager
async def _dealing(attempts: Attempts, facts: OrderFacts, unread: _Unread) -> AsyncIterator[None]:
    """While inside, deltas go to their choices; an error goes to all that still read."""
    task = asyncio.create_task(_deal(attempts, facts, unread))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _deal(attempts: Attempts, facts: OrderFacts, unread: _Unread) -> None:
    held: list[TokenDelta] = []  # until the prompt's logprobs are there, which begin each choice
    try:
        async with aclosing(attempts.deltas()) as deltas:
            async for delta in deltas:
                facts.see(delta)
                held.append(delta)
                if facts.are_complete:
                    for each in held:
                        await unread.put(each)
                    held.clear()
        unread.fail(InternalError("the tokens ended before each choice had its last"))
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        unread.fail(cut_short(error))
    except Exception as error:
        unread.fail(error)


class _Unread:
    """Deltas between the worker and the choices: one writer, a reader for each choice."""

    def __init__(self, num_choices: int) -> None:
        self._of_choice: list[asyncio.Queue[TokenDelta | Exception]] = [asyncio.Queue() for _ in range(num_choices)]
        self._ended: set[int] = set()  # choices that read no more
        self._num = 0
        self._room = asyncio.Event()

    async def put(self, delta: TokenDelta) -> None:
        """Returns when there is room for the next one."""
        if delta.choice in self._ended:
            return
        self._of_choice[delta.choice].put_nowait(delta)
        self._num += _size(delta)
        while self._num > _MAX_UNREAD:
            self._room.clear()
            await self._room.wait()

    def fail(self, error: Exception) -> None:
        for deltas in self._of_choice:
            deltas.put_nowait(error)

    async def read(self, choice: int) -> AsyncGenerator[TokenDelta, None]:
        """Raises the error of the worker behind the deltas that came before it."""
        deltas = self._of_choice[choice]
        try:
            while True:
                yield self._taken(await deltas.get())
        finally:
            self._ended.add(choice)
            while not deltas.empty():
                item = deltas.get_nowait()
                if isinstance(item, TokenDelta):
                    self._taken(item)

    def _taken(self, item: TokenDelta | Exception) -> TokenDelta:
        if isinstance(item, Exception):
            raise item
        self._num -= _size(item)
        self._room.set()
        return item


def _size(delta: TokenDelta) -> int:
    return len(delta.token_ids) + sum(1 + len(entry.top_token_ids) for entry in delta.logprobs)
