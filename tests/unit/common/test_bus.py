from __future__ import annotations

import asyncio
import time

import pytest

from common import trace
from common.bus import Bus, MemoryBus, NatsBus
from common.errors import Unavailable
from tests.servers import RealServer


async def heard(bus: Bus, pattern: str) -> list[tuple[str, bytes]]:
    out: list[tuple[str, bytes]] = []

    async def handler(subject: str, payload: bytes) -> None:
        out.append((subject, payload))

    await bus.subscribe(pattern, handler)
    return out


async def until(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


async def test_facts_reach_all_listeners_with_their_request_id(nats: RealServer) -> None:
    one, two = [await NatsBus.connect(nats.url, "test", 5) for _ in range(2)]
    seen: list[str] = []

    async def handler(_subject: str, _payload: bytes) -> None:
        seen.append(trace.request_id.get())

    await two.subscribe("shoal.load.*", handler)
    facts = await heard(one, "shoal.>")
    await two._client.flush()
    with trace.attached({trace.REQUEST_ID_KEY: "req-1"}):
        await one.publish("shoal.load.decode-0", b"x")
    await until(lambda: seen and facts)
    assert facts == [("shoal.load.decode-0", b"x")]
    assert seen == ["req-1"]
    await one.close()
    await two.close()


async def test_a_restarted_server_is_found_again_and_subscriptions_come_back(nats: RealServer) -> None:
    bus = await NatsBus.connect(nats.url, "test", 5)
    facts = await heard(bus, "shoal.load.*")
    nats.kill()
    await until(lambda: not bus.connected)
    await bus.publish("shoal.load.a", b"lost")  # neither hangs nor raises
    await asyncio.sleep(3)  # more reconnect tries than the client's default pause would allow
    nats.start()
    await until(lambda: bus.connected)
    await bus.publish("shoal.load.a", b"kept")
    await until(lambda: facts)
    assert facts == [("shoal.load.a", b"kept")]
    await bus.close()


async def test_an_unreachable_server_is_one_clear_line() -> None:
    with pytest.raises(Unavailable, match=r"NATS at 127.0.0.1:1 is not reachable within 0.5 s"):
        await NatsBus.connect("nats://user:secret@127.0.0.1:1", "test", 0.5)


@pytest.mark.parametrize(("pattern", "matches"), [
    ("a.b", True), ("a.*", True), ("a.>", True), ("*.b", True), ("a", False), ("a.b.c", False), ("a.b.>", False)])
async def test_the_in_memory_bus_matches_subjects_as_nats_does(pattern: str, matches: bool) -> None:
    bus = MemoryBus()
    facts = await heard(bus, pattern)
    await bus.publish("a.b", b"")
    assert bool(facts) is matches
