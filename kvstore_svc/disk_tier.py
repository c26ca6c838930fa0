"""The SSD tier's file: preallocated, one slot per block, all calls blocking (for one thread, off the event loop).

A slot's life: free → header cleared → payload written → header written (committed) → free (the header stays until the
slot is used again: what it says is still true). A process that dies between two steps leaves a free slot; a power cut
may leave a header over a torn payload, which its checksum tells when it is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common import logs
from common.errors import ConfigError
from kvstore_svc import disk_format
from kvstore_svc.disk_format import PAGE, SLAB_HEADER_BYTES, SLOT_HEADER_BYTES, SlotHeader, Superblock
from kvstore_svc.slab_allocator import Slot

log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class FoundSlab:
    """A slab of an earlier life: the committed slots by their place in it."""

    slab: int
    stride: int
    headers: dict[int, SlotHeader]


class DiskTier:
    """Use `open`. `read` and `write` raise `OSError` when the disk fails."""

    def __init__(self, fd: int, superblock: Superblock) -> None:
        self._fd = fd
        self._slab_bytes = superblock.slab_bytes
        self.num_slabs = (superblock.num_bytes - PAGE) // superblock.slab_bytes
        self._strides = [0] * self.num_slabs  # as on disk

    @classmethod
    def open(cls, path: Path, num_bytes: int, slab_bytes: int, deployment_key: bytes) -> DiskTier:
        """Take the file, made or formatted anew when it is absent, empty or of another deployment, version or size.

        Raises `ConfigError` when another process holds it, when it is not ours, or when there is no room.
        """
        wanted = Superblock(num_bytes, slab_bytes, hashlib.blake2b(deployment_key, digest_size=16).digest())
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"ssd_path: cannot open {path}: {error.strerror}", param="ssd_path") from None
        try:
            cls._take(fd, path, wanted)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, wanted)

    @staticmethod
    def _take(fd: int, path: Path, wanted: Superblock) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"ssd_path: {path} is in use by another process", param="ssd_path") from None
        known = disk_format.read_superblock(os.pread(fd, PAGE, 0), str(path))
        if known == wanted:
            return
        if os.fstat(fd).st_size:
            log.warning("ssd_tier_formatted", path=str(path), known=str(known), wanted=str(wanted))
        try:
            os.ftruncate(fd, 0)
            room = os.fstatvfs(fd)
            if room.f_bavail * room.f_frsize < wanted.num_bytes:  # asking the file system would first take all it has
                raise OSError(errno.ENOSPC, f"{room.f_bavail * room.f_frsize} bytes are free")
            os.posix_fallocate(fd, 0, wanted.num_bytes)
            _write_all(fd, wanted.pack(), 0)
        except OSError as error:
            os.ftruncate(fd, 0)
            raise ConfigError(f"ssd_bytes: cannot reserve {wanted.num_bytes} bytes for {path}: {error.strerror}",
                              param="ssd_bytes") from None

    def num_slots(self, stride: int) -> int:
        """Slots of this stride in a slab."""
        return disk_format.num_slots(self._slab_bytes, stride)

    def scan(self) -> Iterator[FoundSlab]:
        """The slabs that hold committed blocks. Call it once, before any write."""
        for slab in range(self.num_slabs):
            stride = disk_format.read_slab_stride(os.pread(self._fd, SLAB_HEADER_BYTES, self._start(slab)))
            if not stride:
                continue
            self._strides[slab] = stride
            count = self.num_slots(stride)
            raw = os.pread(self._fd, count * SLOT_HEADER_BYTES, self._start(slab) + SLAB_HEADER_BYTES)
            headers = {}
            for place in range(count):
                at = place * SLOT_HEADER_BYTES
                header = disk_format.read_slot_header(raw[at : at + SLOT_HEADER_BYTES], stride)
                if header is not None:
                    headers[place] = header
            if headers:
                yield FoundSlab(slab, stride, headers)

    def write(self, slot: Slot, header: SlotHeader, payload: memoryview) -> None:
        """Store a block; committed when this returns."""
        if self._strides[slot.slab] != header.stride:
            count = self.num_slots(header.stride)
            head = disk_format.pack_slab_header(header.stride).ljust(disk_format.head_bytes(count), b"\0")
            _write_all(self._fd, head, self._start(slot.slab))
            self._strides[slot.slab] = header.stride
        else:
            self.erase(slot)
        _write_all(self._fd, payload, self._payload_at(slot, header.stride))
        _write_all(self._fd, header.pack(), self._header_at(slot))

    def read(self, slot: Slot, into: memoryview) -> bool:
        """Fill `into` with the slot's payload; False when the file ends early. The caller checks the checksum."""
        at, num_read = self._payload_at(slot, self._strides[slot.slab]), 0
        while num_read < into.nbytes:
            count = os.preadv(self._fd, [into[num_read:]], at + num_read)
            if count == 0:
                return False
            num_read += count
        return True

    def erase(self, slot: Slot) -> None:
        """The slot's block will not be found by a later life."""
        _write_all(self._fd, bytes(SLOT_HEADER_BYTES), self._header_at(slot))

    def close(self) -> None:
        """Flush and let the file go."""
        try:
            os.fdatasync(self._fd)
        finally:
            os.close(self._fd)

    def _start(self, slab: int) -> int:
        return PAGE + slab * self._slab_bytes

    def _header_at(self, slot: Slot) -> int:
        return self._start(slot.slab) + SLAB_HEADER_BYTES + slot.place * SLOT_HEADER_BYTES

    def _payload_at(self, slot: Slot, stride: int) -> int:
        return self._start(slot.slab) + disk_format.head_bytes(self.num_slots(stride)) + slot.place * stride


def _write_all(fd: int, payload: bytes | memoryview, offset: int) -> None:
    view = memoryview(payload)
    while view.nbytes:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
