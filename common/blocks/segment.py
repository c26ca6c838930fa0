"""A memory-mapped file that processes of one host share: raw bytes, no layout of its own.

States: created (by its owner, who holds the file's lock while it lives) or opened (by anybody) → closed. The name goes
with `unlink`, the memory with the last mapping and view; so a reader of an unlinked segment still reads what was there.
An owner that was killed leaves the name behind and its lock free: `remove_stale` takes such files away.
Python's `shared_memory` is not used, as its tracker unlinks what other processes still need.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

from common import logs
from common.errors import InvalidRequest, Overloaded

log = logs.get(__name__)

SUFFIX: Final = ".segment"
_RESERVE_BYTES: Final = 1 << 16


class Segment:
    """Use `create` or `open`. Pages take memory when first touched, or when reserved."""

    def __init__(self, path: Path, fd: int, num_bytes: int, owner: bool) -> None:
        self.path, self.num_bytes = path, num_bytes
        self._fd, self._owner = fd, owner
        self._map = mmap.mmap(fd, num_bytes)
        self._bytes = memoryview(self._map)
        self._closed = False
        self._reserved = bytearray(-(-num_bytes // _RESERVE_BYTES))  # 1 = the unit's memory is taken

    @classmethod
    def create(cls, path: str | Path, num_bytes: int) -> Segment:
        """A new file; its name should end in `.segment`. Raises `FileExistsError`, or `OSError` when it cannot be."""
        path, made = Path(path), Path(f"{path}.new")
        if num_bytes < 1:
            raise ValueError(f"num_bytes must be at least 1, got {num_bytes}")
        if path.exists():
            raise FileExistsError(f"{path} exists")
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, num_bytes)
            segment = cls(path, fd, num_bytes, owner=True)
            os.rename(made, path)  # named only when locked and whole
        except BaseException:
            made.unlink(missing_ok=True)
            os.close(fd)
            raise
        return segment

    @classmethod
    def open(cls, path: str | Path) -> Segment:
        """Map all of an existing file. Raises `OSError` (`FileNotFoundError` when its owner has gone)."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(Path(path), fd, os.fstat(fd).st_size, owner=False)
        except BaseException:
            os.close(fd)
            raise

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Writable, no copy; stays valid after `close`. Raises `InvalidRequest` when out of bounds."""
        if self._closed:
            raise ValueError(f"segment {self.path.name} is closed")
        if offset < 0 or num_bytes < 0 or offset + num_bytes > self.num_bytes:
            raise InvalidRequest(f"offset: [{offset}, {offset + num_bytes}) is outside of segment {self.path.name}, "
                                 f"which has {self.num_bytes} bytes", param="offset")
        return self._bytes[offset : offset + num_bytes]

    def is_reserved(self, offset: int, num_bytes: int) -> bool:
        """Whether `reserve` has taken the memory of this range already."""
        return 0 not in self._reserved[offset // _RESERVE_BYTES : -(-(offset + num_bytes) // _RESERVE_BYTES)]

    def reserve(self, offset: int, num_bytes: int) -> None:
        """Take the memory now, about as slow as a copy. Without it, a write to a full file system kills the writer.

        Raises `Overloaded` when there is not enough, `InvalidRequest` when out of bounds.
        """
        self.view(offset, num_bytes).release()
        if self.is_reserved(offset, num_bytes):
            return
        first, last = offset // _RESERVE_BYTES, -(-(offset + num_bytes) // _RESERVE_BYTES)
        end = min(last * _RESERVE_BYTES, self.num_bytes)
        try:
            os.posix_fallocate(self._fd, first * _RESERVE_BYTES, end - first * _RESERVE_BYTES)
        except OSError as error:
            raise Overloaded(f"{self.path.parent} has no room for {num_bytes} more bytes: {error.strerror}",
                             retry_after_s=1.0) from None
        self._reserved[first:last] = b"\1" * (last - first)

    @property
    def file_id(self) -> tuple[int, int]:
        """Device and inode: the same for every mapping of this file, whatever its name."""
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino

    @property
    def is_unlinked(self) -> bool:
        return os.fstat(self._fd).st_nlink == 0

    def rename(self, path: Path) -> None:
        """The same memory under another name of the same folder, for its owner. Raises `OSError`."""
        os.rename(self.path, path)
        self.path = path

    def unlink(self) -> None:
        """Take the name away; nobody can open it any more. Idempotent."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up this mapping; the memory itself goes with its last view. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            log.debug("segment_closes_with_its_last_view", segment=self.path.name)
        os.close(self._fd)


def remove_stale(shm_dir: Path) -> int:
    """Unlink the segments in the folder whose owner is dead; returns how many."""
    num_removed = 0
    for path in shm_dir.glob(f"*{SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            num_removed += 1
        except OSError:
            continue  # its owner lives
        finally:
            os.close(fd)
    return num_removed
