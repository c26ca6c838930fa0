"""The prompts of one call run side by side, as one stream of events: choices numbered over all, prompt by prompt."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.merging import merged
from gateway.order import Ending, Order, Piece, Usage
from gateway.pipeline import Pipeline


def run_all(
    pipeline: Pipeline, orders: Sequence[Order], deadline: float, at_once: int,
    on_placed: Callable[[Usage], None] | None = None,
) -> AsyncGenerator[Piece | Ending, None]:
    """An ending for each choice of each order; usages are of the whole call so far. An error of one order ends all.

    `on_placed` is told the usage whenever the prompt of another order is about to be given to a worker.
    """
    if len(orders) == 1:
        return pipeline.run(orders[0], deadline, on_placed)
    counts = _CallCounts(len(orders), on_placed)
    return merged([_numbered(pipeline, order, deadline, index, index * order.n, counts)
                   for index, order in enumerate(orders)], at_once)


class _CallCounts:
    """The usage of a call: of each order the last that was told."""

    def __init__(self, num_orders: int, on_placed: Callable[[Usage], None] | None) -> None:
        self._on_placed = on_placed
        self._of_order = [Usage(0, 0, 0)] * num_orders
        self._total = Usage(0, 0, 0)

    def take(self, index: int, usage: Usage) -> Usage:
        old, total = self._of_order[index], self._total
        self._of_order[index] = usage
        self._total = Usage(
            total.num_prompt_tokens + usage.num_prompt_tokens - old.num_prompt_tokens,
            total.num_cached_tokens + usage.num_cached_tokens - old.num_cached_tokens,
            total.num_output_tokens + usage.num_output_tokens - old.num_output_tokens)
        return self._total

    def placed(self, index: int, usage: Usage) -> None:
        total = self.take(index, usage)
        if self._on_placed is not None:
            self._on_placed(total)


async def _numbered(
    pipeline: Pipeline, order: Order, deadline: float, index: int, first_choice: int, counts: _CallCounts
) -> AsyncGenerator[Piece | Ending, None]:
    async with aclosing(pipeline.run(order, deadline, functools.partial(counts.placed, index))) as events:
        async for event in events:
            yield replace(event, choice=first_choice + event.choice, usage=counts.take(index, event.usage))
