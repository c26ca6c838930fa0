from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.blocks.checksum import checksum
from common.errors import ConfigError
from kvstore_svc import disk_tier
from kvstore_svc.disk_format import SlotHeader, head_bytes, num_slots
from kvstore_svc.disk_tier import DiskTier
from kvstore_svc.slab_allocator import Slot
from tests.unit.kvstore_svc.builders import KEY, ROOT, chain, content

NUM_BYTES, SLAB_BYTES, STRIDE = 4096 + 4 * 65_536, 65_536, 4096


def opened(folder: Path, key: bytes = KEY, num_bytes: int = NUM_BYTES) -> DiskTier:
    return DiskTier.open(folder / "tier.ssd", num_bytes, SLAB_BYTES, key)


def stored(disk: DiskTier, slot: Slot, key: bytes, stride: int = STRIDE) -> SlotHeader:
    payload = content(key, stride)
    header = SlotHeader(stride, len(payload), checksum(payload), key, ROOT)
    disk.write(slot, header, memoryview(payload))
    return header


def read(disk: DiskTier, slot: Slot, stride: int = STRIDE) -> bytes:
    into = bytearray(stride)
    assert disk.read(slot, memoryview(into))
    return bytes(into)


def test_what_was_written_is_found_and_read_by_a_later_life(tmp_path: Path) -> None:
    first, second, other = chain("a", 3)
    disk = opened(tmp_path)
    headers = {0: stored(disk, Slot(1, 0), first), 5: stored(disk, Slot(1, 5), second)}
    stored(disk, Slot(3, 2), other, stride=8192)
    disk.close()
    disk = opened(tmp_path)
    found = list(disk.scan())
    assert [(slab.slab, slab.stride, sorted(slab.headers)) for slab in found] == [(1, 4096, [0, 5]), (3, 8192, [2])]
    assert found[0].headers == headers
    assert read(disk, Slot(1, 5)) == content(second)
    assert read(disk, Slot(3, 2), 8192) == content(other, 8192)
    disk.close()


def test_erased_slots_and_slots_of_a_slab_that_changed_its_stride_are_not_found(tmp_path: Path) -> None:
    keys = chain("a", 4)
    disk = opened(tmp_path)
    for place, key in enumerate(keys[:3]):
        stored(disk, Slot(0, place), key)
    stored(disk, Slot(1, 0), keys[3])
    disk.erase(Slot(1, 0))
    stored(disk, Slot(0, 1), keys[3], stride=8192)
    disk.close()
    disk = opened(tmp_path)
    assert [(slab.slab, {p: h.key for p, h in slab.headers.items()}) for slab in disk.scan()] == [(0, {1: keys[3]})]
    disk.close()


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_process_that_dies_inside_a_write_leaves_no_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int, torn: bool
) -> None:
    """Each write to the file may be the last one, and the last one may be torn."""
    keys = chain("a", 2)
    disk = opened(tmp_path)
    old = stored(disk, Slot(0, 0), keys[0])
    real, numbers = disk_tier._write_all, iter(range(10))

    def write(fd: int, raw: bytes, at: int) -> None:
        number = next(numbers)
        if number == last and torn:
            real(fd, memoryview(raw)[: len(raw) // 2], at)
        if number >= last:
            raise OSError(5, "killed here")
        real(fd, raw, at)

    monkeypatch.setattr(disk_tier, "_write_all", write)
    with pytest.raises(OSError, match="killed here"):
        stored(disk, Slot(0, 0), keys[1])
    monkeypatch.undo()
    disk.close()
    disk = opened(tmp_path)
    found = [header for slab in disk.scan() for header in slab.headers.values()]
    if (last, torn) == (0, False):  # nothing had happened yet: the old block is still whole
        assert found == [old]
        assert read(disk, Slot(0, 0)) == content(keys[0])
    else:
        assert found == []
    disk.close()


@pytest.mark.parametrize("change", [{"key": b"another deployment's key" * 2}, {"num_bytes": NUM_BYTES + SLAB_BYTES}])
def test_a_file_of_another_deployment_or_size_starts_empty(tmp_path: Path, change: dict[str, object]) -> None:
    disk = opened(tmp_path)
    stored(disk, Slot(0, 0), chain("a", 1)[0])
    disk.close()
    disk = opened(tmp_path, **change)  # type: ignore[arg-type]
    assert not list(disk.scan())
    disk.close()


def test_a_damaged_superblock_starts_empty_and_a_strange_file_is_left_alone(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    stored(disk, Slot(0, 0), chain("a", 1)[0])
    disk.close()
    with (tmp_path / "tier.ssd").open("r+b") as file:
        file.seek(12)
        file.write(b"?")
    disk = opened(tmp_path)
    assert not list(disk.scan())
    disk.close()
    (tmp_path / "tier.ssd").write_bytes(b"my thesis")
    with pytest.raises(ConfigError, match="not a file of the KV store"):
        opened(tmp_path)
    assert (tmp_path / "tier.ssd").read_bytes() == b"my thesis"


def test_one_process_holds_the_file(tmp_path: Path) -> None:
    disk = opened(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        opened(tmp_path)
    disk.close()
    opened(tmp_path).close()


def test_a_size_that_the_disk_cannot_give_is_refused_with_the_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ssd_bytes") as caught:
        opened(tmp_path, num_bytes=1 << 60)
    assert caught.value.param == "ssd_bytes"
    assert (tmp_path / "tier.ssd").stat().st_size == 0


def test_a_reservation_that_fails_half_way_keeps_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.posix_fallocate

    def fails_late(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fails_late)
    with pytest.raises(ConfigError, match="No space left"):
        opened(tmp_path)
    assert (tmp_path / "tier.ssd").stat().st_blocks == 0


@pytest.mark.parametrize("stride", [64, 4096, 8192, 61_440, 65_536])
def test_slots_end_within_their_slab(stride: int) -> None:
    count = num_slots(SLAB_BYTES, stride)
    assert head_bytes(count) + count * stride <= SLAB_BYTES
    assert head_bytes(count + 1) + (count + 1) * stride > SLAB_BYTES
