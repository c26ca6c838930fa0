"""The folder in shared memory where the workers and stores of one stack meet, and those of no other.

States: absent → held → absent. Its supervisor holds the kernel's lock on the folder itself for life, so a folder with a
free lock is a dead stack's, and whoever starts next takes it away: memory must not stay taken until the next boot.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from common.blocks.host_id import default_shm_dir
from common.blocks.segment import remove_stale
from common.errors import ConfigError

_MEMORY: Final = Path("/dev/shm")
_LOCK_TRIES: Final = 100


@contextmanager
def hold_shm_dir(state_dir: Path, memory: Path = _MEMORY) -> Iterator[Path]:
    """A folder of its own for this state folder, empty at first, gone afterwards. Its caller has claimed `state_dir`.

    Raises `ConfigError` when `memory` cannot be written.
    """
    prefix = f"shoal-{os.getuid()}-"
    path = memory / (prefix + hashlib.blake2b(os.fsencode(state_dir.resolve()), digest_size=6).hexdigest())
    _remove_dead(memory, prefix)
    remove_stale(default_shm_dir())  # of services that were run by hand
    try:
        lock = _made_and_locked(path)
    except OSError as error:
        raise ConfigError(f"no shared memory at {path}: {error.strerror or error}", param="shm_dir") from None
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _made_and_locked(path: Path) -> int:
    """Another starting stack may take the folder for a dead one's between the two: then once more."""
    for _ in range(_LOCK_TRIES):
        path.mkdir(mode=0o700, exist_ok=True)
        if path.lstat().st_uid != os.getuid():
            raise OSError(0, "another user made it")
        with contextlib.suppress(FileNotFoundError):
            lock = _locked(path)
            if lock is not None:
                return lock
    raise OSError(0, "its lock is held by another process")


def _remove_dead(memory: Path, prefix: str) -> None:
    for path in memory.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            lock = _locked(path)
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the folder's lock; None when another has it, or the folder was replaced meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
