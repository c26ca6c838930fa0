"""Who shares memory files with whom."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def default_shm_dir() -> Path:
    """A folder in memory, apart for each user."""
    return Path(f"/dev/shm/shoal-{os.getuid()}")


def open_shm_dir(shm_dir: str | Path) -> Path:
    """The folder, made if absent, for its owner alone. Empty: `default_shm_dir`. Raises `OSError`."""
    path = Path(shm_dir) if str(shm_dir) else default_shm_dir()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def host_id(shm_dir: str | Path) -> str:
    """Equal exactly for processes that see the same `shm_dir`: one kernel's life, one folder on one file system.

    Two containers of one machine are equal only when they mount the same folder. The folder must exist.
    """
    folder = os.stat(shm_dir)
    text = f"{_BOOT_ID.read_text().strip()}:{folder.st_dev}:{folder.st_ino}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
