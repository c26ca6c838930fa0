from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_svc.slab_allocator import SlabAllocator, Slot, stride_of


def allocator(num_slabs: int = 4, slab_bytes: int = 256) -> SlabAllocator:
    return SlabAllocator(num_slabs, lambda stride: slab_bytes // stride)


def test_a_slab_serves_another_size_only_after_its_last_slot_came_back() -> None:
    slabs = allocator(num_slabs=1)
    first, second = slabs.alloc(100), slabs.alloc(128)
    assert first is not None
    assert second is not None
    assert slabs.alloc(128) is None
    slabs.free(first)
    assert slabs.alloc(64) is None
    slabs.free(second)
    assert [slabs.alloc(64) is not None for _ in range(5)] == [True] * 4 + [False]


def test_a_block_larger_than_a_slab_never_fits() -> None:
    assert not allocator().fits(257)
    assert allocator().fits(256)
    assert allocator().alloc(257) is None


def test_a_slot_that_is_not_granted_cannot_be_freed() -> None:
    slabs = allocator()
    slot = slabs.alloc(64)
    assert slot is not None
    slabs.free(slot)
    for wrong in (slot, Slot(3, 0)):
        with pytest.raises(ValueError, match="not granted"):
            slabs.free(wrong)


def test_an_adopted_slab_has_its_used_slots_granted() -> None:
    slabs = allocator(num_slabs=2)
    slabs.adopt(1, 64, {0, 2})
    assert (slabs.num_granted, slabs.granted_bytes) == (2, 128)
    assert {slabs.alloc(64), slabs.alloc(64)} == {Slot(1, 1), Slot(1, 3)}
    slabs.free(Slot(1, 2))


@pytest.mark.parametrize(("num_bytes", "stride"), [(1, 64), (64, 64), (65, 128), (65_535, 65_536), (70_000, 73_728)])
def test_large_blocks_lie_on_whole_pages(num_bytes: int, stride: int) -> None:
    assert stride_of(num_bytes) == stride


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([10, 64, 100, 200, 256])), max_size=120))
def test_slots_never_overlap_and_all_space_comes_back(steps: list[tuple[bool, int]]) -> None:
    slabs, held = allocator(), dict[Slot, int]()
    for grow, num_bytes in steps:
        if grow:
            slot = slabs.alloc(num_bytes)
            if slot is not None:
                assert slot not in held
                held[slot] = stride_of(num_bytes)
        elif held:
            slot = next(iter(held))
            slabs.free(slot)
            del held[slot]
        spans = sorted((s.slab * 256 + s.place * stride, stride) for s, stride in held.items())
        assert all(at + size <= after for (at, size), (after, _) in pairwise(spans))
        assert (slabs.num_granted, slabs.granted_bytes) == (len(held), sum(held.values()))
    for slot in held:
        slabs.free(slot)
    assert [slabs.alloc(256) is not None for _ in range(5)] == [True] * 4 + [False]
