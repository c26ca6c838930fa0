from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import Unavailable
from gateway.merging import merged


class Numbers:
    """A stream of (name, number); knows how many have been read of it and whether it was closed."""

    def __init__(self, name: int, count: int, fails: bool = False) -> None:
        self.name, self.count, self.fails = name, count, fails
        self.num_read = 0
        self.closed = False

    async def items(self) -> AsyncGenerator[tuple[int, int], None]:
        try:
            for number in range(self.count):
                await asyncio.sleep(0)
                self.num_read += 1
                yield self.name, number
            if self.fails:
                raise ValueError(self.name)
        finally:
            self.closed = True


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 90), max_size=6), at_once=st.integers(1, 4))
def test_every_item_comes_once_and_those_of_one_stream_in_their_order(counts: list[int], at_once: int) -> None:
    streams = [Numbers(name, count) for name, count in enumerate(counts)]

    async def read() -> list[tuple[int, int]]:
        return [item async for item in merged([s.items() for s in streams], at_once)]

    items = asyncio.run(read())
    for stream in streams:
        assert [number for name, number in items if name == stream.name] == list(range(stream.count))
        assert stream.closed


async def test_no_more_streams_run_than_may_at_once() -> None:
    streams = [Numbers(name, 30) for name in range(5)]
    async for _ in merged([s.items() for s in streams], 2):
        assert sum(s.num_read > 0 and not s.closed for s in streams) <= 2


async def test_the_first_error_is_raised_after_what_came_before_it_and_closes_all() -> None:
    streams = [Numbers(0, 3, fails=True), Numbers(1, 10**9)]
    seen = list[tuple[int, int]]()

    async def read() -> None:
        async for item in merged([s.items() for s in streams], 2):
            seen.append(item)

    with pytest.raises(ValueError, match="0"):
        await read()
    assert [number for name, number in seen if name == 0] == [0, 1, 2]
    assert all(s.closed for s in streams)


async def test_a_reader_that_leaves_closes_all_and_one_that_waits_holds_all_up() -> None:
    streams = [Numbers(name, 10**9) for name in range(3)]
    async with aclosing(merged([s.items() for s in streams], 3)) as items:
        await anext(items)
        before = -1
        while before != sum(s.num_read for s in streams):
            before = sum(s.num_read for s in streams)
            for _ in range(20):
                await asyncio.sleep(0)
        assert before < 100
    assert all(s.closed for s in streams)


async def test_a_cancel_from_inside_a_stream_is_an_error_that_ends_all() -> None:
    async def cut() -> AsyncGenerator[tuple[int, int], None]:
        yield 0, 0
        raise asyncio.CancelledError

    other = Numbers(1, 10**9)
    async def read() -> None:
        async for _ in merged([cut(), other.items()], 2):
            pass

    with pytest.raises(Unavailable):
        await asyncio.wait_for(read(), 20)
    assert other.closed
