from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from router_svc.index import PrefixIndex
from router_svc.overlay import SpeculativeOverlay
from tests.unit.router_svc.builders import block, chain

WORKERS = [f"w{i}" for i in range(5)]
HASHES = st.lists(st.integers(0, 11).map(block), max_size=6)
OPERATIONS = st.lists(st.tuples(
    st.sampled_from(["store", "remove", "clear"]), st.sampled_from(WORKERS), HASHES), max_size=40)


def naive_match(held: dict[str, set[bytes]], hashes: list[bytes]) -> dict[str, int]:
    depths = {}
    for worker_id, own in held.items():
        depth = 0
        while depth < len(hashes) and hashes[depth] in own:
            depth += 1
        if depth:
            depths[worker_id] = depth
    return depths


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.lists(HASHES, min_size=1, max_size=4), st.dictionaries(
    st.integers(0, 11).map(block), st.sets(st.sampled_from(WORKERS), min_size=1), max_size=4))
def test_the_index_agrees_with_one_set_of_hashes_per_worker(
    operations: list[tuple[str, str, list[bytes]]], queries: list[list[bytes]], expected: dict[bytes, set[str]]
) -> None:
    index, held = PrefixIndex(1000), {worker_id: set[bytes]() for worker_id in WORKERS}
    for verb, worker_id, hashes in operations:
        match verb:
            case "store":
                index.store(worker_id, hashes)
                held[worker_id].update(hashes)
            case "remove":
                index.remove(worker_id, hashes)
                held[worker_id].difference_update(hashes)
            case "clear":
                index.clear(worker_id)
                held[worker_id].clear()
    assert {w: index.held(w) for w in WORKERS} == held
    assert {w: index.num_held(w) for w in WORKERS} == {w: len(own) for w, own in held.items()}
    assert index.num_blocks == len(set().union(*held.values()))
    for hashes in queries:
        assert index.match(hashes) == naive_match(held, hashes)
        soon = {w: own | {h for h, workers in expected.items() if w in workers} for w, own in held.items()}
        assert index.match(hashes, lambda h: expected.get(h, ())) == naive_match(soon, hashes)


@settings(max_examples=100, deadline=None)
@given(st.lists(
    st.tuples(st.sampled_from(WORKERS), st.lists(st.integers(0, 199).map(block), max_size=60)), max_size=20))
def test_a_full_index_forgets_but_never_invents(stored: list[tuple[str, list[bytes]]]) -> None:
    index, held = PrefixIndex(64), {worker_id: set[bytes]() for worker_id in WORKERS}
    for worker_id, hashes in stored:
        index.store(worker_id, hashes)
        held[worker_id].update(hashes)
        assert index.num_blocks <= 64
    assert all(index.held(w) <= held[w] for w in WORKERS)
    assert index.num_blocks == len(set().union(*(index.held(w) for w in WORKERS)))


def test_a_hole_ends_a_workers_prefix() -> None:
    index = PrefixIndex(100)
    index.store("w0", chain(0, 4))
    index.store("w1", chain(0, 4))
    index.remove("w1", [block(1)])
    assert index.match(chain(0, 6)) == {"w0": 4, "w1": 1}


def test_removing_a_block_that_a_worker_lacks_leaves_the_rest_of_the_batch_in_force() -> None:
    index = PrefixIndex(100)
    index.store("w0", chain(0, 3))
    index.store("w1", chain(0, 3))
    index.remove("w0", [block(99), block(2), block(77), block(0)])
    assert index.held("w0") == {block(1)}
    assert index.held("w1") == set(chain(0, 3))


def test_a_slot_that_is_used_again_brings_nothing_of_its_last_worker() -> None:
    index = PrefixIndex(100)
    index.store("old", chain(0, 3))
    index.clear("old")
    index.store("new", chain(1, 1))
    assert index.match(chain(0, 3)) == {}
    assert index.match(chain(1, 2)) == {"new": 1}


def test_an_expected_block_counts_until_its_time_is_over_or_its_worker_ends() -> None:
    overlay = SpeculativeOverlay(ttl_s=5, max_entries=100)
    overlay.place("w0", chain(0, 2), now=0)
    overlay.place("w1", chain(0, 2), now=1)
    overlay.place("w0", chain(0, 1), now=2)  # again: lives longer
    assert set(overlay.workers(block(0))) == {"w0", "w1"}
    overlay.expire(5.5)
    assert overlay.workers(block(1)) == ("w1",)
    assert set(overlay.workers(block(0))) == {"w0", "w1"}
    overlay.drop("w1")
    assert overlay.workers(block(1)) == ()
    overlay.expire(7.5)
    assert overlay.num_entries == 0


def test_the_overlay_keeps_to_its_bound_by_dropping_the_oldest() -> None:
    overlay = SpeculativeOverlay(ttl_s=100, max_entries=10)
    for i in range(6):
        overlay.place("w0", chain(4 * i, 4), now=i)
        assert overlay.num_entries <= 10
    assert overlay.workers(block(20)) == ("w0",)
    assert overlay.workers(block(0)) == ()
