"""How a model folder comes to be, whole or not at all.

A folder's life: absent → staged (`.<name>.partial`, only while its lock is held) → whole (renamed into place in one
step). A crash leaves a staging folder, which the next holder of the lock removes; a folder under the final name is
always whole. The lock is the kernel's, so a dead holder never keeps it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ModelLoadError

LOCK_DEADLINE_S = 1800.0
CONVERT_DEADLINE_S = 3600.0
_POLL_S = 0.1


def build_once(dest: Path, build: Callable[[Path], Path]) -> Path:
    """`dest`, unless it is there made by `build(staging)`, which returns the finished folder inside `staging`."""
    if dest.is_dir():
        return dest
    dest.parent.mkdir(parents=True, exist_ok=True)
    staging = dest.parent / f".{dest.name}.partial"
    with locked(dest.parent / f".{dest.name}.lock"):
        if dest.is_dir():  # another process made it while this one waited
            return dest
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir()
            folder = build(staging)
            _flush(folder)
            folder.rename(dest)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return dest


def require_converter(purpose: str) -> None:
    """Raise `ModelLoadError` naming the first package that is missing to convert a model."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelLoadError(f"{purpose} needs the Python package {module!r}, which is not installed",
                                 param="model")


def run_child(command: list[str], purpose: str, temporary: Path, deadline_s: float, tick: Callable[[], None]) -> None:
    """Run `command`, calling `tick` while it works; past the deadline, or on any error, it is killed.

    `temporary` takes its output and its temporary files. Raises `ModelLoadError` that begins with `purpose`.
    """
    log = temporary / "child.log"
    deadline = time.monotonic() + deadline_s
    with log.open("wb") as sink:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                                 env={**os.environ, "TMPDIR": str(temporary)})
    try:
        while child.poll() is None:
            if time.monotonic() > deadline:
                raise ModelLoadError(f"{purpose} took longer than {deadline_s:.0f} s", param="model")
            tick()
            time.sleep(_POLL_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait(timeout=10)
    if child.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no message"]
        raise ModelLoadError(f"{purpose} failed (exit {child.returncode}): {lines[-1]}", param="model")


def bytes_under(folder: Path) -> int:
    """Files may come and go while we look."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _flush(folder: Path) -> None:
    """To the disk before the rename, so that a power cut cannot leave a whole-looking folder of holes."""
    for path in (*folder.iterdir(), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelLoadError(
                        f"another process has held {path} for more than {LOCK_DEADLINE_S:.0f} s") from None
                time.sleep(_POLL_S)
        yield  # closing the file releases the lock
