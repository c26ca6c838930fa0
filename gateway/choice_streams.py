"""Choices of one order side by side: the deltas of a generation dealt out, the events of its choices merged.

One task reads the worker and hands each delta to its choice, so that a choice that waits for its text holds up no
other. A choice's inbox holds its unread deltas: bounded by its `max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from common.generation import TokenDelta
from gateway.attempts import Attempts
from gateway.choice_text import ChoiceText, OrderFacts
from gateway.merging import merged
from gateway.order import Ending, Piece

_Inbox = asyncio.Queue[TokenDelta | Exception]


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
    inboxes = [_Inbox() for _ in choices]
    streams = [choice.events(_read(inbox)) for choice, inbox in zip(choices, inboxes, strict=True)]
    async with aclosing(merged(streams, len(streams))) as events, _dealing(attempts, facts, inboxes):
        async for event in events:
            if isinstance(event, Ending):
                attempts.drop(event.choice)
            yield event


@asynccontextmanager
async def _dealing(attempts: Attempts, facts: OrderFacts, inboxes: Sequence[_Inbox]) -> AsyncIterator[None]:
    """While inside, deltas go to their inboxes; an error goes to all."""
    task = asyncio.create_task(_deal(attempts, facts, inboxes))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _deal(attempts: Attempts, facts: OrderFacts, inboxes: Sequence[_Inbox]) -> None:
    held: list[TokenDelta] = []  # until the prompt's logprobs are there, which begin each choice
    try:
        async with aclosing(attempts.deltas()) as deltas:
            async for delta in deltas:
                facts.see(delta)
                held.append(delta)
                if facts.are_complete:
                    for each in held:
                        inboxes[each.choice].put_nowait(each)
                    held.clear()
    except Exception as error:
        for inbox in inboxes:
            inbox.put_nowait(error)


async def _read(inbox: _Inbox) -> AsyncGenerator[TokenDelta, None]:
    while True:
        item = await inbox.get()
        if isinstance(item, Exception):
            raise item
        yield item
