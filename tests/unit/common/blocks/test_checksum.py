from __future__ import annotations

import random

import pytest

from common.blocks.checksum import checksum, copy_with_checksum

SIZES = [0, 1, 7, 2047, 2048, 2049, 4096, 262_144, 262_145, 737_280]


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_makes_equal_bytes_and_the_checksum_of_the_source(size: int) -> None:
    source = random.Random(size).randbytes(size)
    destination = bytearray(size)
    assert copy_with_checksum(memoryview(destination), source) == checksum(source)
    assert destination == source


@pytest.mark.parametrize("size", SIZES[1:])
def test_any_flipped_bit_changes_it(size: int) -> None:
    rng = random.Random(size)
    clean = rng.randbytes(size)
    known = checksum(clean)
    for _ in range(20):
        broken = bytearray(clean)
        broken[rng.randrange(size)] ^= 1 << rng.randrange(8)
        assert checksum(broken) != known


def test_rows_that_change_places_torn_tails_and_other_lengths_change_it() -> None:
    clean = random.Random(1).randbytes(600_000)
    known = checksum(clean)
    for first, second, size in ((0, 2048, 2048), (2040, 2048, 8), (4096, 300_000, 4096), (1, 599_000, 100)):
        swapped = bytearray(clean)
        swapped[first : first + size], swapped[second : second + size] = (
            clean[second : second + size], clean[first : first + size])
        assert checksum(swapped) != known
    assert checksum(clean[:300_000] + bytes(300_000)) != known
    assert checksum(clean + b"\0") != known
    assert checksum(bytes(4096)) != checksum(bytes(2048))


def test_a_view_at_an_odd_address_is_fine() -> None:
    clean = random.Random(2).randbytes(10_000)
    assert checksum(memoryview(b"x" + clean)[1:]) == checksum(clean)


def test_a_copy_between_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="3 bytes, source 4"):
        copy_with_checksum(memoryview(bytearray(3)), b"four")
