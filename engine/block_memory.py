"""Host memory for a pool of KV blocks: of this process alone, or a file in memory that another process maps too."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

Allocate = Callable[[int], memoryview]  # number of bytes -> writable, zeroed, page-aligned; pages are taken as used


def private(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared(file: int) -> Allocate:
    """Memory of an empty memory file (`os.memfd_create`), which grows to the size that is asked for."""

    def allocate(num_bytes: int) -> memoryview:
        os.ftruncate(file, num_bytes)
        return memoryview(mmap.mmap(file, num_bytes))

    return allocate


def mapped(file: int) -> memoryview:
    """What `shared` has allocated in this file, as another process sees it."""
    return memoryview(mmap.mmap(file, os.fstat(file).st_size))
