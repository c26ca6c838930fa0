"""Proof of a process's life and death for others on its host.

Life: held from `hold` until `release` or the end of the process, however it ends: the kernel frees the file's lock. A
stopped process still holds it. So a free or absent file proves that no write of that process can come any more.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from common.errors import InvalidRequest

SUFFIX: Final = ".alive"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Liveness:
    """Held by one process under a name of its own, for example `<service id>-<incarnation>`."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        self._held = True

    @classmethod
    def hold(cls, shm_dir: Path, name: str) -> Liveness:
        """Raises `BlockingIOError` when another process holds the name, `InvalidRequest` for a bad name."""
        path = _path(shm_dir, name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def release(self) -> None:
        """Say that nothing of this process will be written any more. Idempotent."""
        if self._held:
            self._held = False
            self.path.unlink(missing_ok=True)
            os.close(self._fd)


def is_alive(shm_dir: Path, name: str) -> bool:
    """Whether a process holds the name. A dead one's file is removed. Raises `InvalidRequest` for a bad name."""
    path = _path(shm_dir, name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(fd)


def check_name(name: str) -> None:
    """Raises `InvalidRequest` for a name that `hold` would refuse."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"name: must be 1 to 128 letters, digits, '.', '_' or '-', got {name!r}", param="name")


def _path(shm_dir: Path, name: str) -> Path:
    check_name(name)
    return shm_dir / f"{name}{SUFFIX}"
