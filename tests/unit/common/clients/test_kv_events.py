from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from common.bus import Bus, MemoryBus, NatsBus
from common.clients.kv_events import (
    KV_STREAM,
    MAX_BATCH_HASHES,
    MAX_WAITING_BATCHES,
    KvBatch,
    KvEventPublisher,
    KvSnapshot,
    follow_kv_events,
    read_snapshot,
    snapshot_chunks,
)
from common.errors import Unavailable
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from proto import worker_pb2
from tests.servers import RealServer


def chain(first: int, length: int) -> tuple[bytes, ...]:
    return tuple((first + i).to_bytes(16, "big") for i in range(length))


ROOT = chain(10**9, 1)[0]


async def listening(bus: Bus) -> list[KvBatch]:
    heard: list[KvBatch] = []

    async def on_batch(batch: KvBatch) -> None:
        heard.append(batch)

    await follow_kv_events(bus, on_batch)
    return heard


async def until(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def held(snapshot: KvSnapshot) -> set[bytes]:
    return {h for stored in snapshot.stored for h in stored.hashes}


async def test_events_arrive_as_they_were_with_seq_from_one() -> None:
    bus = MemoryBus()
    heard = await listening(bus)
    publisher = KvEventPublisher(bus, "w", "a", "m")
    publisher.start()
    events: list[list[KvEvent]] = [
        [BlockStored(chain(0, 3), ROOT), BlockRemoved(chain(1, 1))], [BlocksCleared(), BlockStored(chain(7, 1), ROOT)]]
    for one in events:
        publisher.publish(one)
    publisher.publish([])  # nothing to say: no batch
    await until(lambda: len(heard) == 2)
    assert heard == [KvBatch("w", "a", "m", seq, tuple(one)) for seq, one in enumerate(events, 1)]
    publisher.stop()


async def test_a_snapshot_is_what_all_batches_up_to_its_seq_amount_to() -> None:
    publisher = KvEventPublisher(MemoryBus(), "w", "a", "m")
    publisher.publish([BlockStored(chain(0, 5), ROOT), BlockStored(chain(20, 2), chain(2, 1)[0])])
    publisher.publish([BlockRemoved((*chain(4, 1), *chain(99, 1)))])
    snapshot = publisher.snapshot()
    assert snapshot.seq == 2
    assert held(snapshot) == {*chain(0, 4), *chain(20, 2)}
    assert [(s.parent, s.hashes) for s in snapshot.stored] == [
        (ROOT, chain(0, 4)), (chain(2, 1)[0], chain(20, 2))]
    publisher.publish([BlocksCleared()])
    assert publisher.snapshot() == KvSnapshot("w", "a", 3, ())


async def test_a_snapshot_survives_its_chunks_and_one_that_is_cut_short_is_not_taken() -> None:
    publisher = KvEventPublisher(MemoryBus(), "w", "a", "m")
    publisher.publish([BlockStored(chain(0, 2 * MAX_BATCH_HASHES + 3), ROOT)])
    chunks = list(snapshot_chunks(publisher.snapshot()))
    assert len(chunks) == 3
    assert [c.last for c in chunks] == [False, False, True]

    async def stream(sent: list[worker_pb2.SnapshotChunk]) -> AsyncIterator[worker_pb2.SnapshotChunk]:
        for chunk in sent:
            yield chunk

    read = await read_snapshot(stream(chunks))
    assert held(read) == set(chain(0, 2 * MAX_BATCH_HASHES + 3))
    assert read.seq == publisher.seq
    empty = KvEventPublisher(MemoryBus(), "w", "a", "m").snapshot()
    assert await read_snapshot(stream(list(snapshot_chunks(empty)))) == KvSnapshot("w", "a", 0, ())
    with pytest.raises(Unavailable):
        await read_snapshot(stream(chunks[:2]))


async def test_a_huge_batch_goes_as_several_with_the_chain_kept() -> None:
    bus = MemoryBus()
    heard = await listening(bus)
    publisher = KvEventPublisher(bus, "w", "a", "m")
    publisher.start()
    publisher.publish([BlockStored(chain(0, MAX_BATCH_HASHES + 1), ROOT)])
    await until(lambda: len(heard) == 2)
    assert [b.seq for b in heard] == [1, 2]
    assert heard[1].events == (BlockStored(chain(MAX_BATCH_HASHES, 1), chain(MAX_BATCH_HASHES - 1, 1)[0]),)
    publisher.stop()


async def test_while_the_bus_is_down_the_seq_goes_on_and_a_heartbeat_shows_the_gap_at_once_afterwards() -> None:
    bus = MemoryBus()
    heard = await listening(bus)
    publisher = KvEventPublisher(bus, "w", "a", "m", heartbeat_s=60)
    publisher.start()
    publisher.publish([BlockStored(chain(0, 1), ROOT)])
    await until(lambda: heard)
    bus.connected = False
    publisher.publish([BlockStored(chain(1, 1), ROOT)])
    await asyncio.sleep(0.05)
    bus.connected = True
    await until(lambda: heard[-1].seq == 2)
    assert heard[-1].events == ()
    assert held(publisher.snapshot()) == {*chain(0, 1), *chain(1, 1)}
    publisher.publish([BlockStored(chain(2, 1), ROOT)])
    await until(lambda: heard[-1].seq == 3 and heard[-1].events)
    publisher.stop()


async def test_what_waits_is_bounded_and_the_listener_sees_that_some_is_missing() -> None:
    bus = MemoryBus()
    heard = await listening(bus)
    publisher = KvEventPublisher(bus, "w", "a", "m", heartbeat_s=0.02)
    for number in range(MAX_WAITING_BATCHES + 1):  # not started: nothing leaves
        publisher.publish([BlockStored(chain(number, 1), ROOT)])
    publisher.start()
    await until(lambda: heard)
    assert heard[0].seq == MAX_WAITING_BATCHES + 1
    assert heard[0].events == ()
    publisher.stop()


async def test_a_listener_that_starts_later_gets_what_was_kept_in_order_and_then_the_new(nats: RealServer) -> None:
    sender, receiver = [await NatsBus.connect(nats.url, name, 5) for name in ("sender", "receiver")]
    publisher = KvEventPublisher(sender, "w", "a", "m", heartbeat_s=60)
    publisher.start()
    for number in range(50):
        publisher.publish([BlockStored(chain(number, 1), ROOT)])
    await until(lambda: not publisher._waiting)
    heard = await listening(receiver)
    await until(lambda: len(heard) >= 50)
    publisher.publish([BlockRemoved(chain(0, 1))])
    await until(lambda: len(heard) >= 51)
    assert [b.seq for b in heard] == list(range(1, 52))
    publisher.stop()
    await sender.close()
    await receiver.close()


async def test_a_restarted_nats_loses_the_stream_and_both_ends_go_on_by_themselves(nats: RealServer) -> None:
    sender, receiver = [await NatsBus.connect(nats.url, name, 5) for name in ("sender", "receiver")]
    publisher = KvEventPublisher(sender, "w", "a", "m", heartbeat_s=0.2)
    publisher.start()
    heard = await listening(receiver)
    for number in range(100):  # the stream that comes after the restart counts from 1 again
        publisher.publish([BlockStored(chain(1000 + number, 1), ROOT)])
    await until(lambda: any(b.seq == 100 for b in heard))
    for turn in range(50, 53):
        nats.kill()
        await until(lambda: not sender.connected and not receiver.connected)
        publisher.publish([BlockStored(chain(2 * turn, 1), ROOT)])
        await asyncio.sleep(0.3)
        nats.start()
        await until(lambda at=2 * turn + 1: heard[-1].seq == at)  # type: ignore[misc]
        publisher.publish([BlockStored(chain(2 * turn + 1, 1), ROOT)])
        await until(lambda at=2 * turn + 2: any(b.seq == at and b.events for b in heard))  # type: ignore[misc]
    publisher.stop()
    await sender.close()
    await receiver.close()


async def test_a_consumer_that_the_server_dropped_is_made_again_without_loss_or_repeat(nats: RealServer) -> None:
    sender, receiver = [await NatsBus.connect(nats.url, name, 5) for name in ("sender", "receiver")]
    publisher = KvEventPublisher(sender, "w", "a", "m", heartbeat_s=60)
    publisher.start()
    heard = await listening(receiver)
    publisher.publish([BlockStored(chain(0, 1), ROOT)])
    await until(lambda: heard)
    manager = sender._client.jsm()
    for consumer in await manager.consumers_info(KV_STREAM.name):
        await manager.delete_consumer(KV_STREAM.name, consumer.name)
    publisher.publish([BlockStored(chain(1, 1), ROOT)])
    await until(lambda: len(heard) == 2)
    publisher.publish([BlockStored(chain(2, 1), ROOT)])
    await until(lambda: len(heard) == 3)
    assert [b.seq for b in heard] == [1, 2, 3]
    publisher.stop()
    await sender.close()
    await receiver.close()


async def test_a_stream_is_kept_in_memory_within_its_limits(nats: RealServer) -> None:
    bus = await NatsBus.connect(nats.url, "test", 5)
    await bus.append(KV_STREAM, "shoal.kv.w", b"x")
    config = (await bus._client.jsm().stream_info(KV_STREAM.name)).config
    assert (config.storage, config.discard, config.max_bytes, config.max_age) == ("memory", "old", 64 << 20, 600)
    await bus.close()
