from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import redis.asyncio as redis

from common.kv_event import BlockRemoved, BlocksCleared, BlockStored
from common.registry import RedisRegistry
from common.service_record import ServiceRecord
from router_svc.redis_mirror import HASHES_PER_CALL, MAX_PENDING_HASHES, RedisMirror
from tests.delay_proxy import DelayProxy
from tests.servers import RealServer
from tests.unit.router_svc.builders import block, chain, record

ROOT = block(10_000_000)
W = record("w")


class Index:
    """What the mirror reads when it replaces a worker's blocks."""

    def __init__(self, *hashes: bytes) -> None:
        self.hashes: Collection[bytes] = hashes

    def __call__(self, _worker_id: str) -> Collection[bytes]:
        return self.hashes


@asynccontextmanager
async def mirror_on(url: str, index: Callable[[str], Collection[bytes]] | None = None) -> AsyncIterator[RedisMirror]:
    client = redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)
    mirror = RedisMirror(client, index or Index())
    mirror.start()
    try:
        yield mirror
    finally:
        await mirror.stop()
        await client.aclose()


async def until_loaded(mirror: RedisMirror, seq: int, worker_id: str = "w") -> set[bytes]:
    """The mirrored hashes once they stand at `seq`."""
    async with asyncio.timeout(10):
        while True:
            with suppress(redis.RedisError, OSError):
                for worker in await mirror.load():
                    if worker.worker_id == worker_id and worker.seq == seq:
                        assert len(set(worker.hashes)) == len(worker.hashes)
                        return set(worker.hashes)
            await asyncio.sleep(0.02)


async def test_a_router_that_starts_finds_what_another_has_written(valkey: RealServer) -> None:
    index = Index(*chain(0, 3))
    async with mirror_on(valkey.url, index) as writer:
        writer.replace(W, 5)
        await until_loaded(writer, 5)
        writer.write(W, 6, [BlockStored(chain(3, 4), block(2)), BlockRemoved((block(0), block(999)))])
        writer.write(W, 7, [BlockStored((block(20),), ROOT)])
        await until_loaded(writer, 7)
    async with mirror_on(valkey.url) as reader:
        assert await until_loaded(reader, 7) == {*chain(1, 6), block(20)}
        (worker,) = await reader.load()
        assert worker.incarnation == "a"


async def test_two_routers_repeat_each_other_without_harm_and_the_slower_brings_nothing_back(
    valkey: RealServer
) -> None:
    async with mirror_on(valkey.url) as one, mirror_on(valkey.url) as two:
        one.replace(W, 0)
        await until_loaded(one, 0)
        one.write(W, 1, [BlockStored(chain(0, 4), ROOT)])
        one.write(W, 2, [BlockRemoved((block(3),))])
        assert await until_loaded(one, 2) == set(chain(0, 3))
        two.write(W, 1, [BlockStored(chain(0, 4), ROOT)])  # late: would bring block 3 back
        await asyncio.sleep(0.2)
        assert await until_loaded(one, 2) == set(chain(0, 3))
        two.write(W, 2, [BlockRemoved((block(3),))])
        two.write(W, 3, [BlockStored((block(8),), ROOT)])
        assert await until_loaded(two, 3) == {*chain(0, 3), block(8)}


async def test_a_late_router_never_brings_an_old_life_back(valkey: RealServer) -> None:
    new = dataclasses.replace(W, incarnation="b", started_at_unix_s=200.0)
    async with mirror_on(valkey.url, Index(*chain(50, 2))) as ahead, mirror_on(valkey.url, Index(*chain(0, 4))) as late:
        late.replace(W, 40)
        await until_loaded(late, 40)
        ahead.replace(new, 1)
        await until_loaded(ahead, 1)
        for tell in (lambda: late.write(W, 41, [BlockStored((block(9),), ROOT)]), lambda: late.replace(W, 42),
                     lambda: late.forget(W)):
            tell()
            await asyncio.sleep(0.2)
            assert await until_loaded(ahead, 1) == set(chain(50, 2))
        ahead.write(new, 2, [BlockStored((block(52),), block(51))])
        assert await until_loaded(ahead, 2) == set(chain(50, 3))


async def test_an_older_snapshot_of_the_same_life_does_not_undo_a_newer_state(valkey: RealServer) -> None:
    async with mirror_on(valkey.url, Index(*chain(0, 5))) as ahead, mirror_on(valkey.url, Index(block(1))) as late:
        ahead.replace(W, 9)
        await until_loaded(ahead, 9)
        late.replace(W, 4)
        await asyncio.sleep(0.2)
        assert await until_loaded(ahead, 9) == set(chain(0, 5))


async def test_missing_batches_make_the_whole_be_replaced(valkey: RealServer) -> None:
    index = Index(*chain(0, 2))
    async with mirror_on(valkey.url, index) as mirror:
        mirror.replace(W, 1)
        await until_loaded(mirror, 1)
        index.hashes = chain(0, 7)
        mirror.write(W, 4, [BlockStored((block(6),), block(5))])  # 2 and 3 never came to Redis
        assert await until_loaded(mirror, 4) == set(chain(0, 7))


async def test_a_cleared_cache_and_a_worker_that_left_are_gone_from_redis(valkey: RealServer) -> None:
    async with mirror_on(valkey.url, Index(*chain(0, 3))) as mirror:
        mirror.replace(W, 1)
        await until_loaded(mirror, 1)
        mirror.write(W, 2, [BlocksCleared(), BlockStored((block(5),), ROOT)])
        assert await until_loaded(mirror, 2) == {block(5)}
        mirror.forget(W)
        async with asyncio.timeout(5):
            while await mirror.load():
                await asyncio.sleep(0.02)
        left = redis.from_url(valkey.url)
        assert await left.keys("shoal:kv:*") == []
        await left.aclose()


async def test_many_blocks_go_over_in_few_calls_and_arrive_whole(valkey: RealServer) -> None:
    many = chain(0, 3 * HASHES_PER_CALL + 17)
    async with mirror_on(valkey.url, Index(*many)) as mirror:
        mirror.replace(W, 1)
        assert await until_loaded(mirror, 1) == set(many)
        more = chain(len(many), HASHES_PER_CALL + 5)
        mirror.write(W, 2, [BlockStored(more, many[-1])])
        assert await until_loaded(mirror, 2) == {*many, *more}


async def test_what_happened_while_redis_was_down_is_there_when_it_is_back(valkey: RealServer) -> None:
    index = Index(*chain(0, 2))
    async with mirror_on(valkey.url, index) as mirror:
        mirror.replace(W, 1)
        await until_loaded(mirror, 1)
        valkey.kill()
        index.hashes = chain(0, 5)
        for seq in (2, 3, 4):
            mirror.write(W, seq, [BlockStored((block(seq),), block(seq - 1))])
        async with asyncio.timeout(10):
            while mirror.reachable:
                await asyncio.sleep(0.02)
        valkey.start()
        assert await until_loaded(mirror, 4) == set(chain(0, 5))
        assert mirror.reachable


async def test_too_much_to_write_is_replaced_instead_of_kept_in_memory(valkey: RealServer) -> None:
    index = Index()
    async with mirror_on(valkey.url, index) as mirror:
        valkey.kill()
        mirror.replace(W, 0)
        seq = 0
        for seq in range(1, 8):
            mirror.write(W, seq, [BlockStored(chain(seq * MAX_PENDING_HASHES, MAX_PENDING_HASHES // 2), ROOT)])
        index.hashes = chain(0, 3)
        valkey.start()
        assert await until_loaded(mirror, seq) == set(chain(0, 3))


async def test_a_cancelled_call_to_redis_never_hands_its_answer_to_the_next_caller(valkey: RealServer) -> None:
    workers = [record(f"w{i}") for i in range(2)]
    async with mirror_on(valkey.url, Index(*chain(0, 4))) as mirror:
        for one in workers:
            mirror.replace(one, 1)
            await until_loaded(mirror, 1, one.service_id)
    async with DelayProxy(valkey.port, 0.008) as proxy:
        client = redis.from_url(f"redis://127.0.0.1:{proxy.port}/0", socket_timeout=5, max_connections=2)
        reader = RedisMirror(client, Index())
        await client.set("k1", "v1")
        await client.set("k2", "v2")
        calls: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: _get(client, "k1"), reader.load, lambda: _script(client), lambda: _pipeline(client)]
        for turn in range(200):
            cancelled = asyncio.create_task(calls[turn % len(calls)]())
            await asyncio.sleep(0.004)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            if turn % 10:
                assert await client.get("k2") == b"v2"
            else:
                assert {w.worker_id: set(w.hashes) for w in await reader.load()} == {
                    "w0": set(chain(0, 4)), "w1": set(chain(0, 4))}
        await client.aclose()


async def _get(client: redis.Redis, key: str) -> object:
    return await client.get(key)


async def _script(client: redis.Redis) -> object:
    return await cast(Any, client.eval("return 'v1'", 0))


async def _pipeline(client: redis.Redis) -> object:
    pipeline = client.pipeline()
    pipeline.get("k1")
    pipeline.get("k1")
    return await pipeline.execute()


async def test_a_cancelled_look_up_leaves_the_registry_its_own_answers(valkey: RealServer) -> None:
    async with DelayProxy(valkey.port, 0.01) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        registry = await RedisRegistry.connect(url, 5)
        key = await registry.deployment_key()
        lease = await registry.register(W, 30)
        for _ in range(20):
            listing = asyncio.create_task(registry.list())
            await asyncio.sleep(0.005)
            listing.cancel()
            await asyncio.gather(listing, return_exceptions=True)
            assert await registry.deployment_key() == key
        listed: list[ServiceRecord] = await registry.list()
        assert [r.service_id for r in listed] == ["w"]
        await lease.release()
        await registry.close()
