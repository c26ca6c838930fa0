from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.requests import Request

from common.errors import DeadlineExceeded, Overloaded, PayloadTooLarge
from gateway.request_body import BodyLimits, BodyReader


class Sender:
    """A request whose body comes as it is sent here; None ends it."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.request = Request(
            {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}, self._receive)

    async def _receive(self) -> dict[str, object]:
        part = await self.parts.get()
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}


def reader(max_at_once: int = 2, max_bytes_at_once: int = 100, timeout_s: float = 60.0) -> BodyReader:
    return BodyReader(BodyLimits(60, timeout_s, max_at_once, max_bytes_at_once, retry_after_s=1.5))


@asynccontextmanager
async def half_sent(bodies: BodyReader, num_bytes: int) -> AsyncIterator[tuple[Sender, asyncio.Task[bytes]]]:
    sender = Sender()
    sender.parts.put_nowait(b"x" * num_bytes)
    reading = asyncio.create_task(bodies.read(sender.request))
    await asyncio.sleep(0.01)
    try:
        yield sender, reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def whole(num_bytes: int) -> Request:
    sender = Sender()
    sender.parts.put_nowait(b"x" * num_bytes)
    sender.parts.put_nowait(None)
    return sender.request


async def test_bodies_beyond_the_number_are_refused_until_one_has_been_read() -> None:
    bodies = reader()
    async with half_sent(bodies, 1), half_sent(bodies, 1) as (second, reading):
        with pytest.raises(Overloaded, match="2 request bodies") as refused:
            await bodies.read(whole(1))
        assert refused.value.retry_after_s == 1.5
        second.parts.put_nowait(None)
        assert await reading == b"x"
        assert await bodies.read(whole(3)) == b"xxx"


async def test_bodies_beyond_the_bytes_are_refused_until_one_has_gone() -> None:
    bodies = reader(max_at_once=9)
    async with half_sent(bodies, 50):
        async with half_sent(bodies, 45):
            with pytest.raises(Overloaded, match="100 bytes"):
                await bodies.read(whole(6))
            assert await bodies.read(whole(5)) == b"xxxxx"
        assert await bodies.read(whole(50)) == b"x" * 50


async def test_a_body_that_fails_gives_its_room_back() -> None:
    bodies = reader(max_at_once=1, timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(PayloadTooLarge):
            await bodies.read(whole(61))
        with pytest.raises(DeadlineExceeded):
            await bodies.read(Sender().request)
    assert await bodies.read(whole(60)) == b"x" * 60
