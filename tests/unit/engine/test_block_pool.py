import pytest

from common.kv_event import BlockRemoved, BlocksCleared, BlockStored
from engine.block_pool import BlockCounts, BlockPool, LedgerError

A, B, C, ROOT = (bytes([i]) * 16 for i in range(4))


def test_a_freed_block_with_a_hash_stays_found_until_it_is_granted_again() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish([block], [A], ROOT)
    pool.release([block])
    assert pool.lookup(A) == block
    assert pool.counts() == BlockCounts(free=1, cached=1, requests=0)
    pool.take(2)
    assert pool.lookup(A) is None
    pool.check([[0, 1]])


def test_uncached_blocks_are_granted_before_cached_ones() -> None:
    pool = BlockPool(3)
    first, second, third = pool.take(3)
    pool.publish([first], [A], ROOT)
    pool.release([first, second, third])
    assert first not in pool.take(2)
    assert pool.lookup(A) == first


def test_the_least_recently_released_content_is_evicted_first_and_leaves_before_parents() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.publish(blocks, [A, B, C], ROOT)
    pool.release(reversed(blocks))
    pool.take(1)
    assert [pool.lookup(h) is not None for h in (A, B, C)] == [True, True, False]
    pool.take(1)
    assert [pool.lookup(h) is not None for h in (A, B)] == [True, False]


def test_a_shared_block_returns_only_with_its_last_reference() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.num_grantable == 0
    pool.check([[block]])
    pool.release([block])
    assert pool.num_grantable == 1


def test_sharing_a_cached_block_takes_it_out_of_the_free_queue() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.publish([block], [A], ROOT)
    pool.release([block])
    pool.share([block])
    assert pool.take(1) != (block,)
    assert pool.lookup(A) == block


def test_two_requests_may_hold_the_same_content_and_one_copy_stays_cached() -> None:
    pool = BlockPool(3, max_events=9)
    one, two = pool.take(2)
    pool.publish([one], [A], ROOT)
    pool.publish([two], [A], ROOT)
    pool.check([[one], [two]])
    pool.release([one])
    assert pool.lookup(A) == two
    pool.release([two])
    assert pool.counts() == BlockCounts(free=2, cached=1, requests=0)
    assert pool.lookup(A) == two
    pool.check([])
    assert pool.take_events() == [BlockStored((A,), ROOT)]
    pool.take(3)
    assert pool.take_events() == [BlockRemoved((A,))]


def test_content_computed_anew_replaces_its_cached_copy() -> None:
    pool = BlockPool(2, max_events=9)
    (old,) = pool.take(1)
    pool.publish([old], [A], ROOT)
    pool.release([old])
    (new,) = pool.take(1)
    pool.publish([new], [A], ROOT)
    assert pool.lookup(A) == new
    assert pool.counts() == BlockCounts(free=1, cached=0, requests=1)
    pool.check([[new]])
    assert pool.take_events() == [BlockStored((A,), ROOT)]


def test_clear_forgets_what_nobody_uses_and_says_exactly_that() -> None:
    pool = BlockPool(2, max_events=9)
    one, two = pool.take(2)
    pool.publish([one, two], [A, B], ROOT)
    pool.release([two])
    pool.take_events()
    pool.clear()
    assert pool.take_events() == [BlockRemoved((B,))]
    assert pool.lookup(A) == one
    pool.release([one])
    pool.clear()
    assert pool.take_events() == [BlocksCleared()]
    assert pool.counts() == BlockCounts(free=2, cached=0, requests=0)


def test_a_slow_reader_of_events_is_told_to_forget_and_then_hears_the_newest() -> None:
    pool = BlockPool(4, max_events=2)
    for block, block_hash in zip(pool.take(3), (A, B, C), strict=True):
        pool.publish([block], [block_hash], ROOT)
    assert pool.take_events() == [BlocksCleared(), BlockStored((C,), ROOT)]


def test_no_events_are_kept_when_nobody_asked_for_them() -> None:
    pool = BlockPool(1)
    pool.publish(pool.take(1), [A], ROOT)
    assert pool.take_events() == []


def test_misuse_is_an_error_not_a_wrong_ledger() -> None:
    pool = BlockPool(1)
    with pytest.raises(LedgerError, match="2 blocks asked for, 1 grantable"):
        pool.take(2)
    with pytest.raises(LedgerError, match="without a reference"):
        pool.release([0])
    with pytest.raises(LedgerError, match="cannot be published"):
        pool.publish([0], [A], ROOT)


def test_the_ledger_check_finds_a_leak_and_a_block_owned_twice() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    assert pool.count_leaked([blocks]) == 0
    assert pool.count_leaked([blocks[:1]]) == 1
    with pytest.raises(LedgerError, match="has 1 references, 0 block tables and pins hold it"):
        pool.check([blocks[:1]])
    with pytest.raises(LedgerError, match="has 1 references, 2 block tables and pins hold it"):
        pool.check([blocks, blocks[:1]])


def test_a_pinned_block_keeps_its_content_and_has_an_owner_of_its_own() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.publish(blocks, [A, B], ROOT)
    assert pool.pin([A, C]) == {A: blocks[0]}
    assert pool.pin([A]) == {A: blocks[0]}
    pool.check([blocks])
    assert pool.counts() == BlockCounts(free=1, cached=0, requests=2, pinned=0)
    pool.release(blocks)
    pool.check([])
    assert pool.count_leaked([]) == 0
    assert pool.counts() == BlockCounts(free=1, cached=1, requests=0, pinned=1)
    pool.clear()
    assert blocks[0] not in pool.take(2)
    pool.unpin([blocks[0]])
    assert pool.num_grantable == 0
    pool.unpin([blocks[0]])
    assert (pool.lookup(A), pool.num_pinned, pool.num_grantable) == (blocks[0], 0, 1)


def test_a_cached_block_leaves_the_free_queue_while_pinned_and_a_chain_comes_back_leaf_first() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.publish(blocks, [A, B], ROOT)
    pool.release(reversed(blocks))
    pinned = pool.pin([A, B])
    assert pool.num_grantable == 0
    pool.unpin(pinned.values())
    assert pool.take(1) == (blocks[1],)
    assert pool.lookup(A) == blocks[0]


def test_an_unpin_without_a_pin_is_an_error() -> None:
    pool = BlockPool(1)
    pool.take(1)
    with pytest.raises(LedgerError, match="block 0 unpinned without a pin"):
        pool.unpin([0])
