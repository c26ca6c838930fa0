"""Blocks on their way between DRAM and SSD."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.errors import Overloaded
from kvstore_svc.chain_index import Tier
from tests.unit.kvstore_svc.builders import Rig, chain

A, B, C, D = (chain(name, 6) for name in "abcd")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, dram_blocks=8, ssd_blocks=16)
    yield rig
    rig.pool.check()
    await rig.close()


async def test_a_put_is_written_through_to_ssd_soon(rig: Rig) -> None:
    rig.mover.start()
    await rig.put(A)
    await rig.mover.flush()
    assert rig.in_tier(A, Tier.SSD) == [True] * 6
    assert rig.store.lookup(A) == [Tier.DRAM] * 6


async def test_full_dram_demotes_leaf_first_and_a_get_promotes_again(rig: Rig) -> None:
    await rig.put(A)
    await rig.put(B)
    assert rig.in_tier(A, Tier.DRAM) == [True, True, False, False, False, False]
    assert rig.store.lookup(A) == [Tier.DRAM] * 2 + [Tier.SSD] * 4
    assert await rig.get(A) == 6
    assert rig.store.lookup(A) == [Tier.DRAM] * 6
    assert rig.store.counters.num_hits_ssd == 4
    assert await rig.get(B) == 6


async def test_a_full_ssd_gives_up_the_oldest_leaf_and_parents_outlive_children(rig: Rig) -> None:
    for keys in (A, B, C, D):
        assert await rig.put(keys) == 6
    assert await rig.put(chain("e", 3)) == 3
    prefixes = [len(rig.store.lookup(keys)) for keys in (A, B, C, D)]
    assert prefixes == [sum(rig.pool.index.get(key) is not None for key in keys) for keys in (A, B, C, D)]  # no holes
    assert prefixes[0] < 6
    assert prefixes[2:] == [6, 6]
    assert await rig.get(A) == prefixes[0]


async def test_demotion_writes_a_parent_before_its_child(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real = rig.mover._written
    monkeypatch.setattr(rig.mover, "_written", lambda *args: written.append(args[1].key) or real(*args))
    await rig.put(A)
    await rig.put(B)
    assert written == A


async def test_what_is_on_ssd_is_there_after_a_restart_and_is_whole(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ssd_blocks=16)
    rig.mover.start()
    await rig.put(A)
    await rig.put(B)
    await rig.mover.flush()
    await rig.close()
    rig = Rig(tmp_path, ssd_blocks=16)
    assert rig.num_recovered == 12
    assert rig.store.lookup(A) == [Tier.SSD] * 6
    assert await rig.get(A) == await rig.get(B) == 6
    assert rig.store.counters.num_hits_ssd == 12
    rig.pool.check()
    await rig.close()


@pytest.mark.parametrize("what", ["payload", "header"])
async def test_a_flipped_byte_on_disk_is_a_miss_and_the_key_can_be_put_again(tmp_path: Path, what: str) -> None:
    rig = Rig(tmp_path, ssd_blocks=16)
    rig.mover.start()
    await rig.put(A)
    await rig.mover.flush()
    await rig.close()
    raw = bytearray((tmp_path / "tier.ssd").read_bytes())
    at = raw.index(A[3] * 100) + 5000 % 4096 if what == "payload" else raw.index(A[3])
    raw[at] ^= 4
    (tmp_path / "tier.ssd").write_bytes(raw)
    for life in range(2):
        rig = Rig(tmp_path, ssd_blocks=16)
        assert rig.num_recovered == (6 if what == "payload" and not life else 5)
        assert await rig.get(A) == 3
        assert rig.mover.num_corrupt == (1 if what == "payload" and not life else 0)
        rig.pool.check()
        await rig.close()
    rig = Rig(tmp_path, ssd_blocks=16)
    assert await rig.put(A[:4]) == 1
    assert await rig.get(A) == 6
    await rig.close()


async def test_two_gets_of_one_chain_promote_it_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.put(A)
    await rig.put(B)
    reads: list[int] = []
    real = rig.mover._read
    monkeypatch.setattr(rig.mover, "_read", lambda block, into: reads.append(1) or real(block, into))
    assert await asyncio.gather(rig.get(A), rig.get(A)) == [6, 6]
    assert len(reads) == 4


async def test_a_block_being_written_is_not_evicted_under_the_copy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), rig.mover._written
    monkeypatch.setattr(rig.mover, "_written", lambda *args: gate.wait(10) and real(*args))
    rig.mover.start()
    await rig.put(A[:1])
    await asyncio.sleep(0.02)
    evicting = asyncio.create_task(rig.store.evict())
    assert await evicting == 0
    gate.set()
    await rig.mover.flush()
    assert rig.in_tier(A[:1], Tier.SSD) == [True]
    assert await rig.store.evict() == 1


async def test_a_cancelled_get_leaves_no_pin_and_no_held_slot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.put(A)
    await rig.put(B)
    gate, real = threading.Event(), rig.mover._read
    monkeypatch.setattr(rig.mover, "_read", lambda block, into: gate.wait(10) and real(block, into))
    getting = asyncio.create_task(rig.store.get(A, 60))
    await asyncio.sleep(0.02)
    getting.cancel()
    gate.set()
    await asyncio.gather(getting, return_exceptions=True)
    assert getting.cancelled()
    assert rig.pool.num_held(Tier.DRAM) == 0
    assert await rig.store.evict() == 12


async def test_a_failing_disk_costs_hits_and_nothing_else(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object) -> None:
        raise OSError(5, "broken disk")

    assert rig.disk is not None
    await rig.put(A)
    monkeypatch.setattr(rig.disk, "write", broken)
    await rig.put(B)
    assert await rig.get(B) == 6
    assert await rig.get(A) == 2
    monkeypatch.undo()
    await rig.put(A)
    monkeypatch.setattr(rig.disk, "read", broken)
    monkeypatch.setattr(rig.disk, "erase", broken)
    assert await rig.get(B) == len(rig.store.lookup(B))
    assert rig.mover.num_disk_errors >= 2


async def test_evicted_by_request_is_gone_after_a_restart_too(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ssd_blocks=16)
    rig.mover.start()
    await rig.put(A)
    await rig.mover.flush()
    assert await rig.store.evict() == 6
    rig.pool.check()
    await rig.close()
    rig = Rig(tmp_path, ssd_blocks=16)
    assert rig.num_recovered == 0
    await rig.close()


async def test_memory_that_the_host_does_not_have_ends_a_put_early(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.put(A[:2])

    def full(_offset: int, _num_bytes: int) -> None:
        raise Overloaded("no room", retry_after_s=1)

    monkeypatch.setattr(rig.segment, "reserve", full)
    monkeypatch.setattr(rig.segment, "is_reserved", lambda *_: False)
    put = await rig.begin(A)
    assert len(put.slots) == 2
    assert rig.pool.num_held(Tier.DRAM) == 0
