from __future__ import annotations

import asyncio
from typing import Any

from gateway.sse import PING, EventStream


class SlowClient:
    """An ASGI `send` that takes body parts only while it is let."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.started = self.ended = False
        self.reads = asyncio.Event()
        self.reads.set()

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            return
        await self.reads.wait()
        assert not self.ended
        self.parts.append(message["body"])
        self.ended = not message["more_body"]


def open_stream(
    client: SlowClient, *, ping_s: float = 60, buffer_bytes: int = 10_000, flush_s: float = 5
) -> EventStream:
    return EventStream(client, ping_s=ping_s, buffer_bytes=buffer_bytes, flush_timeout_s=flush_s)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_gathers_behind_a_slow_client_leaves_in_one_part() -> None:
    client = SlowClient()
    stream = open_stream(client)
    stream.open()
    await stream.write(b"0")
    await settle()
    client.reads.clear()
    for i in range(1, 100):
        await stream.write(b"%d" % i)
        await settle()
    client.reads.set()
    await stream.end(b"end")
    await stream.close()
    assert b"".join(client.parts) == b"".join(b"%d" % i for i in range(100)) + b"end"
    assert len(client.parts) <= 4
    assert client.ended


async def test_a_writer_waits_once_the_buffer_is_full_and_goes_on_when_it_is_read() -> None:
    client = SlowClient()
    client.reads.clear()
    stream = open_stream(client, buffer_bytes=100)
    stream.open()
    await stream.write(b"x" * 60)
    await settle()  # the first is now with the client, which does not take it
    await stream.write(b"x" * 60)
    blocked = asyncio.create_task(stream.write(b"x" * 60))
    await settle()
    assert not blocked.done()
    client.reads.set()
    await asyncio.wait_for(blocked, 5)
    await stream.close()


async def test_only_the_first_ending_counts_even_while_it_is_still_unsent() -> None:
    client = SlowClient()
    stream = open_stream(client)
    stream.open()
    ends = [asyncio.create_task(stream.end(last)) for last in (b"first", b"second")]
    await asyncio.sleep(0)  # both were called before the writer ran
    await stream.write(b"late")
    await asyncio.gather(*ends)
    await stream.close()
    assert client.parts == [b"first"]


async def test_the_end_does_not_wait_for_ever_for_a_client_that_does_not_read() -> None:
    client = SlowClient()
    client.reads.clear()
    stream = open_stream(client, flush_s=0.05)
    stream.open()
    await asyncio.wait_for(stream.end(b"end"), 5)
    await stream.close()
    assert not client.ended


async def test_nothing_is_sent_before_the_stream_is_opened() -> None:
    client = SlowClient()
    stream = open_stream(client)
    assert not stream.is_open
    await stream.close()
    assert not client.started


async def test_pings_come_only_in_silence() -> None:
    client = SlowClient()
    stream = open_stream(client, ping_s=0.02)
    stream.open()
    async with asyncio.timeout(5):
        while client.parts.count(PING) < 2:
            await asyncio.sleep(0.005)
    await stream.end(b"end")
    await stream.close()
    assert client.parts[-1] == b"end"
