from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from common.bus import MemoryBus
from common.clients.kv_events import KvBatch, KvEventPublisher, KvSnapshot
from common.errors import Unavailable
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from common.service_record import ServiceRecord
from router_svc.cache_follower import CacheFollower
from router_svc.index import PrefixIndex
from router_svc.mirror import MirroredWorker, NoMirror
from tests.unit.router_svc.builders import block, chain, record

ROOT = block(10_000)
W, OTHER = record("w"), record("other")


class Source:
    """A worker's publisher whose batches the test delivers by hand, and whose snapshots it may hold back."""

    def __init__(self, incarnation: str = "a", worker_id: str = "w") -> None:
        self.publisher = KvEventPublisher(MemoryBus(), worker_id, incarnation, "m")
        self.worker_id, self.incarnation = worker_id, incarnation

    def batch(self, *events: KvEvent) -> KvBatch:
        self.publisher.publish(events)
        return KvBatch(self.worker_id, self.incarnation, "m", self.publisher.seq, events)

    def heartbeat(self) -> KvBatch:
        return KvBatch(self.worker_id, self.incarnation, "m", self.publisher.seq, ())


class Router:
    def __init__(self, *records: ServiceRecord) -> None:
        self.index = PrefixIndex(10_000)
        self.sources: dict[str, Source] = {}
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_fetched = 0
        self.follower = CacheFollower(self.index, NoMirror(), self.fetch, retry_s=0.01)
        self.list(*records)

    def list(self, *records: ServiceRecord) -> Sequence[str]:
        return self.follower.listed({r.service_id: r for r in records})

    async def fetch(self, of: ServiceRecord) -> KvSnapshot:
        self.num_fetched += 1
        source = self.sources.get(of.service_id)
        if source is None:
            raise Unavailable("not up")
        snapshot = source.publisher.snapshot()
        await self.hold.wait()  # on its way, while events go on
        return snapshot

    async def settle(self, worker_id: str = "w") -> None:
        async with asyncio.timeout(5):
            while self.follower.seq(worker_id) is None:
                await asyncio.sleep(0.005)

    async def up(self, source: Source) -> None:
        self.sources[source.worker_id] = source
        await self.settle(source.worker_id)


async def test_events_in_order_are_applied_and_repeats_change_nothing() -> None:
    router, source = Router(W), Source()
    await router.up(source)
    stored = source.batch(BlockStored(chain(0, 4), ROOT))
    removed = source.batch(BlockRemoved(chain(3, 1)))
    for batch in (stored, removed, stored, source.heartbeat()):
        await router.follower.on_batch(batch)
    assert router.index.held("w") == set(chain(0, 3))
    assert router.num_fetched == 1


async def test_a_worker_that_comes_back_cold_is_not_named_for_what_its_old_life_held() -> None:
    router, old = Router(W), Source("a")
    await router.up(old)
    await router.follower.on_batch(old.batch(BlockStored(chain(0, 4), ROOT)))
    late = old.batch(BlockStored(chain(0, 8), ROOT))
    assert router.index.match(chain(0, 4)) == {"w": 4}
    router.sources["w"] = new = Source("b")
    assert router.list(dataclasses.replace(W, incarnation="b")) == ["w"]
    assert router.index.match(chain(0, 4)) == {}  # at once, before any snapshot
    await router.settle()
    await router.follower.on_batch(late)  # of the old life, after the restart
    assert router.index.match(chain(0, 8)) == {}
    await router.follower.on_batch(new.batch(BlockStored(chain(0, 2), ROOT)))
    assert router.index.match(chain(0, 8)) == {"w": 2}


async def test_a_worker_that_leaves_takes_its_entries_along_and_its_queued_events_count_for_nothing() -> None:
    router, source, other = Router(W, OTHER), Source(), Source(worker_id="other")
    await router.up(source)
    await router.up(other)
    await router.follower.on_batch(source.batch(BlockStored(chain(0, 4), ROOT)))
    await router.follower.on_batch(other.batch(BlockStored(chain(0, 2), ROOT)))
    queued = source.batch(BlockStored(chain(4, 4), block(3)))
    assert router.list(OTHER) == ["w"]
    await router.follower.on_batch(queued)
    assert router.index.match(chain(0, 8)) == {"other": 2}


async def test_a_cleared_cache_is_forgotten_until_new_events_come() -> None:
    router, source = Router(W), Source()
    await router.up(source)
    await router.follower.on_batch(source.batch(BlockStored(chain(0, 4), ROOT)))
    await router.follower.on_batch(source.batch(BlocksCleared()))
    assert router.index.match(chain(0, 4)) == {}
    await router.follower.on_batch(source.batch(BlockStored(chain(0, 1), ROOT)))
    assert router.index.match(chain(0, 4)) == {"w": 1}


async def test_removing_an_absent_block_in_the_middle_of_a_batch_does_not_stop_the_rest() -> None:
    router, source, other = Router(W, OTHER), Source(), Source(worker_id="other")
    await router.up(source)
    await router.up(other)
    await router.follower.on_batch(other.batch(BlockStored(chain(0, 4), ROOT)))
    await router.follower.on_batch(source.batch(BlockStored(chain(0, 4), ROOT)))
    await router.follower.on_batch(source.batch(
        BlockRemoved((block(3), block(77), block(2))), BlockRemoved((block(1),))))
    assert router.index.held("w") == {block(0)}
    assert router.index.match(chain(0, 4)) == {"w": 1, "other": 4}


async def test_a_gap_is_closed_by_a_snapshot_and_what_came_meanwhile_is_applied_after_it() -> None:
    router, source = Router(W), Source()
    await router.up(source)
    source.batch(BlockStored(chain(0, 4), ROOT))  # lost
    seen = source.batch(BlockStored(chain(4, 2), block(3)))
    router.hold.clear()
    await router.follower.on_batch(seen)
    assert router.follower.seq("w") is None
    await asyncio.sleep(0.02)  # the snapshot is taken here and held back
    await router.follower.on_batch(source.batch(BlockRemoved((block(5),))))
    await router.follower.on_batch(source.batch(BlockStored((block(9),), ROOT)))
    router.hold.set()
    await router.settle()
    assert router.index.held("w") == {*chain(0, 5), block(9)}
    assert router.follower.seq("w") == source.publisher.seq


async def test_a_gap_among_the_buffered_batches_takes_another_snapshot() -> None:
    router, source = Router(W), Source()
    router.hold.clear()
    router.sources["w"] = source
    await asyncio.sleep(0.02)
    source.batch(BlockStored(chain(0, 1), ROOT))  # lost, and after the snapshot
    await router.follower.on_batch(source.batch(BlockStored(chain(1, 1), block(0))))
    router.hold.set()
    await router.settle()
    assert router.index.held("w") == set(chain(0, 2))
    assert router.num_fetched >= 2


async def test_a_heartbeat_shows_that_the_last_batch_was_lost() -> None:
    router, source = Router(W), Source()
    await router.up(source)
    source.batch(BlockStored(chain(0, 4), ROOT))
    assert router.index.match(chain(0, 4)) == {}
    await router.follower.on_batch(source.heartbeat())
    await router.settle()
    assert router.index.match(chain(0, 4)) == {"w": 4}


async def test_a_snapshot_is_asked_for_until_the_worker_answers_and_one_of_another_life_is_not_taken() -> None:
    router = Router(W)
    await asyncio.sleep(0.05)
    assert router.num_fetched >= 2
    router.sources["w"] = stranger = Source("z")
    stranger.batch(BlockStored(chain(0, 4), ROOT))
    await asyncio.sleep(0.2)
    assert router.follower.seq("w") is None
    assert router.index.held("w") == frozenset()
    await router.up(Source("a"))
    await router.follower.stop()


async def test_what_the_mirror_knew_stands_in_for_a_snapshot_of_the_same_life_alone() -> None:
    router = Router()
    known = [MirroredWorker("w", "a", 7, chain(0, 3)), MirroredWorker("other", "old", 9, chain(0, 3)),
             MirroredWorker("gone", "a", 9, chain(0, 3))]
    router.follower.load(known, {"w": W, "other": OTHER})
    router.list(W, OTHER)
    assert router.index.match(chain(0, 3)) == {"w": 3}
    for seq, number in ((6, 66), (7, 77), (8, 88)):  # the stream replays what the mirror has
        await router.follower.on_batch(KvBatch("w", "a", "m", seq, (BlockStored((block(number),), ROOT),)))
    assert router.index.held("w") == {*chain(0, 3), block(88)}
    await router.follower.stop()


EVENTS = st.one_of(
    st.builds(BlockStored, st.lists(st.integers(0, 9).map(block), min_size=1, max_size=4).map(tuple), st.just(ROOT)),
    st.builds(BlockRemoved, st.lists(st.integers(0, 9).map(block), min_size=1, max_size=3).map(tuple)),
    st.just(BlocksCleared()))
STEPS = st.lists(st.tuples(EVENTS, st.sampled_from(["deliver", "lose", "twice", "late"])), max_size=25)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_whatever_is_lost_repeated_or_late_the_index_ends_at_what_the_worker_holds(
    steps: list[tuple[KvEvent, str]]
) -> None:
    async def play() -> None:
        router, source = Router(W), Source()
        router.sources["w"] = source
        late: list[KvBatch] = []
        for event, fate in steps:
            batch = source.batch(event)
            late += [batch] if fate == "late" else []
            for _ in range({"deliver": 1, "twice": 2}.get(fate, 0)):
                await router.follower.on_batch(batch)
            await asyncio.sleep(0)
        for batch in [*late, source.heartbeat()]:
            await router.follower.on_batch(batch)
        await router.settle()
        await router.follower.on_batch(source.heartbeat())
        await router.settle()
        held = {h for stored in source.publisher.snapshot().stored for h in stored.hashes}
        assert router.index.held("w") == held
        await router.follower.stop()

    asyncio.run(play())
