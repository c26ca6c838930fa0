"""Segments that are used again with the memory they have: taking new memory from the kernel costs several copies.

A segment's life here: made under a name → in use → given back by its user, when nobody writes to it any more → spare,
under a name of its own → in use again, under a new name → … → dropped, with its memory, by too many spares or `close`.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from common.blocks.segment import SUFFIX, Segment

MAX_SPARE_BYTES: Final = 256 << 20
_LEAST_BYTES: Final = 1 << 16
_PREFIX: Final = "spare-"


class SpareSegments:
    """Spares of one process, at most `max_bytes` together. Not thread-safe."""

    def __init__(self, shm_dir: Path, max_bytes: int = MAX_SPARE_BYTES) -> None:
        self._shm_dir, self._max_bytes = shm_dir, max_bytes
        self._own = secrets.token_hex(8)  # process ids repeat among containers that share the folder
        self._num_names = 0
        self._spares: list[Segment] = []  # the oldest first

    @property
    def num_bytes(self) -> int:
        return sum(spare.num_bytes for spare in self._spares)

    def take(self, path: Path, num_bytes: int) -> Segment:
        """A segment of this name with at least so many bytes, of any content. Raises `OSError` when it cannot be."""
        fitting = [spare for spare in self._spares if spare.num_bytes >= num_bytes]
        if not fitting:
            return Segment.create(path, _rounded(num_bytes))
        segment = min(fitting, key=lambda spare: spare.num_bytes)
        self._spares.remove(segment)
        segment.rename(path)
        return segment

    def give_back(self, segment: Segment) -> None:
        """Nobody writes to it any more, and whoever mapped it under its old name may keep the mapping."""
        self._num_names += 1
        segment.rename(self._shm_dir / f"{_PREFIX}{self._own}-{self._num_names}{SUFFIX}")
        self._spares.append(segment)
        while self.num_bytes > self._max_bytes:
            drop(self._spares.pop(0))

    def close(self) -> None:
        """Drop all spares; one that is given back later would stay."""
        while self._spares:
            drop(self._spares.pop())


def drop(segment: Segment) -> None:
    """Name and mapping go at once, the memory with the last mapping of others."""
    segment.unlink()
    segment.close()


def _rounded(num_bytes: int) -> int:
    """A power of two, so that transfers of similar sizes share spares; only touched pages take memory."""
    return max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
