"""Puts, gets, leases and fences of one node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.blocks.checksum import checksum
from common.errors import InvalidRequest, NotFound
from kvstore_svc.chain_index import Tier
from tests.unit.kvstore_svc.builders import ROOT, Rig, chain, content

A = chain("a", 6)
B = chain("b", 6)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path, dram_blocks=8)
    yield rig
    rig.pool.check()
    await rig.close()


async def expired(rig: Rig) -> None:
    await asyncio.sleep(0.02)
    rig.store.sweep()


async def test_a_chain_goes_in_and_comes_out_as_far_as_it_is_present(rig: Rig) -> None:
    assert await rig.put(A[:4]) == 4
    assert rig.store.lookup(A) == [Tier.DRAM] * 4
    assert await rig.get(A) == 4
    assert await rig.get(A[2:]) == 2
    assert await rig.get(B) == 0
    assert await rig.get([]) == 0
    assert rig.store.num_leased == 0


async def test_present_blocks_are_not_written_again(rig: Rig) -> None:
    await rig.put(A[:2])
    put = await rig.begin(A[:4])
    assert [slot.slot is None for slot in put.slots] == [True, True, False, False]
    assert rig.store.commit_put(put.put_id, put.fence, rig.fill(put)) == 2
    over = await rig.begin(A[:4])
    assert not over.absent
    assert rig.puts.num_open == 0


async def test_nothing_is_seen_before_the_commit_nor_after_an_abort(rig: Rig) -> None:
    put = await rig.begin(A[:2])
    rig.fill(put)
    assert rig.store.lookup(A) == []
    rig.store.abort_put(put.put_id, put.fence)
    rig.store.abort_put(put.put_id, put.fence)
    assert rig.store.lookup(A) == []
    assert rig.pool.num_held(Tier.DRAM) == 0


async def test_a_writer_may_commit_a_part_of_its_blocks(rig: Rig) -> None:
    put = await rig.begin(A[:4])
    assert rig.store.commit_put(put.put_id, put.fence, rig.fill(put)[:2]) == 2
    assert await rig.get(A) == 2
    put = await rig.begin(A[:4])
    with pytest.raises(InvalidRequest, match="checksums"):
        rig.store.commit_put(put.put_id, put.fence, [*rig.fill(put), 1])
    assert rig.pool.num_held(Tier.DRAM) == 0


async def test_a_second_writer_is_not_blocked_and_the_first_commit_wins(rig: Rig) -> None:
    first, second = await rig.begin(A[:2], writer="one"), await rig.begin(A[:3], writer="two")
    assert rig.store.commit_put(second.put_id, second.fence, rig.fill(second)) == 3
    assert rig.store.commit_put(first.put_id, first.fence, rig.fill(first)) == 0
    assert await rig.get(A) == 3


async def test_a_dead_writers_slots_come_back_with_its_lease_and_its_commit_is_refused(rig: Rig) -> None:
    put = await rig.begin(A[:4], lease_s=0.01)
    await expired(rig)
    assert rig.pool.num_held(Tier.DRAM) == 0
    with pytest.raises(NotFound, match="lease has ended"):
        rig.store.commit_put(put.put_id, put.fence, [0] * 4)
    assert rig.store.lookup(A) == []
    assert rig.store.counters.num_expired == 1


async def test_a_stopped_writers_slots_are_granted_to_nobody_until_it_dies(rig: Rig) -> None:
    rig.alive.add("stopped")
    late = await rig.begin(A[:4], writer="stopped", lease_s=0.01)
    slots = {slot.slot for slot in late.absent}
    await expired(rig)
    assert rig.puts.num_quarantined == 4
    assert await rig.put(A[:4], writer="other") == 4  # the keys are free
    other = await rig.begin(B, writer="other")
    assert len(other.absent) == 4  # evicts all of A before it would take what the stopped one may write
    assert not slots & {slot.slot for slot in other.absent}
    rig.store.abort_put(other.put_id, other.fence)
    rig.alive.clear()
    rig.store.sweep()
    assert rig.puts.num_quarantined == 0
    assert await rig.put(B) == 6


@pytest.mark.parametrize("end", ["commit", "abort"])
async def test_a_late_writer_that_says_it_is_done_frees_its_slots_and_stores_nothing(rig: Rig, end: str) -> None:
    rig.alive.add("slow")
    put = await rig.begin(A[:4], writer="slow", lease_s=0.01)
    await expired(rig)
    if end == "commit":
        with pytest.raises(NotFound, match="expired"):
            rig.store.commit_put(put.put_id, put.fence, rig.fill(put))
    else:
        rig.store.abort_put(put.put_id, put.fence)
    assert rig.puts.num_quarantined == rig.pool.num_held(Tier.DRAM) == 0
    assert rig.store.lookup(A) == []


async def test_a_wrong_fence_ends_nobodys_put(rig: Rig) -> None:
    put = await rig.begin(A[:2])
    with pytest.raises(NotFound):
        rig.store.commit_put(put.put_id, put.fence + 1, [0, 0])
    rig.store.abort_put(put.put_id, put.fence + 1)
    assert rig.store.commit_put(put.put_id, put.fence, rig.fill(put)) == 2


async def test_leased_blocks_stay_and_an_ended_lease_lets_them_go(rig: Rig) -> None:
    await rig.put(A)
    lease = await rig.store.get(A, 0.01)
    assert lease is not None
    assert await rig.put(B) == 2  # the two free slots; A cannot go
    assert rig.store.lookup(A) == [Tier.DRAM] * 6
    await expired(rig)
    assert rig.store.num_leased == 0
    assert await rig.put(B[2:], parent=B[1]) == 4
    assert rig.store.lookup(B) == [Tier.DRAM] * 6
    assert rig.store.lookup(A) == [Tier.DRAM] * 2  # leaf first
    await rig.store.release(lease.lease_id)  # late, and nothing happens


async def test_a_put_keeps_the_present_blocks_that_it_builds_on(rig: Rig) -> None:
    await rig.put(A[:4])
    put = await rig.begin(A[:6])
    assert await rig.put(B) == 2
    assert rig.store.commit_put(put.put_id, put.fence, rig.fill(put)) == 2
    assert await rig.get(A) == 6


async def test_readers_hold_at_most_their_share_and_are_told_that_there_is_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_leased_blocks=4)
    await rig.put(A)
    lease = await rig.store.get(A, 60)
    assert lease is not None
    assert (len(lease.blocks), lease.more) == (4, True)
    assert await rig.store.get(A, 60) is None
    await rig.store.release(lease.lease_id)
    rest = await rig.store.get(A[4:], 60)
    assert rest is not None
    assert (len(rest.blocks), rest.more) == (2, False)
    await rig.close()


async def test_writers_hold_at_most_their_share_and_one_of_them_half_of_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_held_blocks=2)
    one = await rig.begin(A, writer="one")
    assert len(one.absent) == 2
    assert not (await rig.begin(A, writer="one")).slots
    assert len((await rig.begin(B, writer="two")).absent) == 2
    assert not (await rig.begin(B, writer="three")).slots
    await rig.close()


async def test_a_block_that_its_reader_found_wrong_is_checked_and_dropped(rig: Rig) -> None:
    await rig.put(A)
    rig.flip_dram(A[2])
    lease, other = await rig.store.get(A, 60), await rig.store.get(A, 60)
    assert lease is not None
    assert other is not None
    await rig.store.release(lease.lease_id, [A[1][16:], A[2][16:]])
    assert rig.store.lookup(A) == [Tier.DRAM] * 2  # A[1] was fine
    assert rig.mover.num_corrupt == 1
    rig.pool.check()  # the other reader still pins the slot
    assert rig.pool.hold(Tier.DRAM, 4096) is not None
    assert rig.pool.hold(Tier.DRAM, 4096) is not None
    assert rig.pool.hold(Tier.DRAM, 4096) is None
    await rig.store.release(other.lease_id)
    assert rig.pool.hold(Tier.DRAM, 4096) is not None
    assert await rig.put(A[:3]) == 1  # the key is free again; its lost children make room
    assert await rig.get(A[:3]) == 3


async def test_bytes_from_another_host_are_checked_block_by_block(rig: Rig) -> None:
    put = await rig.begin(A[:2])
    good = content(A[0])
    for index, key, payload, crc, said in (
        (0, A[0], good[:-1], checksum(good[:-1]), "payload"), (0, A[0], good, 1, "payload"),
        (0, A[1], content(A[1]), checksum(content(A[1])), "block_hash"), (2, A[0], good, checksum(good), "block_hash"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            rig.store.write(put.put_id, put.fence, index, key[16:], payload, crc)
    rig.store.write(put.put_id, put.fence, 0, A[0][16:], good, checksum(good))
    assert rig.store.commit_put(put.put_id, put.fence, [checksum(good)]) == 1
    lease = await rig.store.get(A, 60)
    assert lease is not None
    assert [payload async for _, payload in rig.store.read(lease.lease_id)] == [good]
    with pytest.raises(NotFound):
        rig.store.write(put.put_id, put.fence, 1, A[1][16:], content(A[1]), 0)
    with pytest.raises(NotFound):
        await anext(rig.store.read("no such lease"))


async def test_block_sizes_are_checked(rig: Rig) -> None:
    for num_bytes in (0, 8193):
        with pytest.raises(InvalidRequest, match="block_bytes"):
            await rig.begin(A, num_bytes=num_bytes)
    await rig.put(A[:1])
    with pytest.raises(InvalidRequest, match="has 4096 bytes, not 64"):
        await rig.begin(A[:1], num_bytes=64)
    assert rig.puts.num_open == 0


async def test_blocks_of_two_models_share_the_space_and_never_meet(rig: Rig) -> None:
    small = chain("a", 6, model="other")
    await rig.put(A)
    assert [key[16:] for key in small] == [key[16:] for key in A]
    assert rig.store.lookup(small) == []
    assert await rig.put(small, num_bytes=64) == 6
    assert await rig.get(small) == 6
    assert await rig.get(A) == 6


async def test_evict_takes_what_is_not_in_use_leaf_first(rig: Rig) -> None:
    await rig.put(A[:4])
    lease = await rig.store.get(A[:2], 60)
    assert lease is not None
    assert await rig.store.evict([A[0][16:]]) == 0  # has a child
    assert await rig.store.evict() == 2
    assert rig.store.lookup(A) == [Tier.DRAM] * 2
    await rig.store.release(lease.lease_id)
    assert await rig.store.evict([A[1][16:], A[0][16:]]) == 2
    assert rig.pool.used_bytes(Tier.DRAM) == 0


async def test_a_cancelled_begin_gives_everything_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.put(A[:2])
    real = rig.mover.hold_dram

    async def slow(num_bytes: int) -> object:
        if rig.pool.num_held(Tier.DRAM) == 2:
            await asyncio.sleep(60)
        return await real(num_bytes)

    monkeypatch.setattr(rig.mover, "hold_dram", slow)
    beginning = asyncio.create_task(rig.store.begin_put(A, ROOT, 4096, "w", 60))
    await asyncio.sleep(0.01)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    assert rig.pool.num_held(Tier.DRAM) == rig.puts.num_open == 0
    assert await rig.store.evict() == 2  # no pin is left
