"""`stack.json` in the state folder: what runs, for `status`, `smoke`, `chat` and tests to find.

The truth about "a stack runs here" is the kernel's lock on `stack.lock`, held by its supervisor for life; the file
alone may be a dead one's.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from common.errors import ConfigError, NotFound

_LOCK_TRIES, _LOCK_RETRY_S = 10, 0.03


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One child as the supervisor sees it."""

    state: str
    pid: int | None = None
    restarts: int = 0
    address: str = ""
    metrics_address: str = ""
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class StackState:
    """`state`: starting, ready, stopping."""

    pid: int
    state: str
    url: str
    model: str
    nats_url: str
    redis_url: str
    log_dir: str
    processes: dict[str, ProcessState] = field(default_factory=dict)
    shm_dir: str = ""  # shared by its workers and stores

    def save(self, state_dir: Path) -> None:
        """In one step, readable by its owner only: the URLs may carry credentials."""
        draft = state_dir / f".stack.json.{os.getpid()}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as sink:
            json.dump(dataclasses.asdict(self), sink, indent=1)
        draft.replace(state_dir / "stack.json")


def default_state_dir() -> Path:
    """`$SHOAL_CACHE/stack`, else `~/.cache/shoal/stack`."""
    cache = os.environ.get("SHOAL_CACHE") or Path.home() / ".cache" / "shoal"
    return Path(cache).expanduser() / "stack"


def find_stack(state_dir: Path) -> StackState:
    """The stack that runs with this state folder. Raises `NotFound` when none does."""
    state = _read(state_dir) if _is_locked(state_dir) else None
    if state is None:
        raise NotFound(f"no stack runs here ({state_dir}): start one with `shoal up`")
    return state


@contextmanager
def claim(state_dir: Path) -> Iterator[None]:
    """Own the state folder while inside. Raises `ConfigError` naming the stack that owns it already."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        handle = (state_dir / "stack.lock").open("w")
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir}: {error.strerror}", param="state_dir") from None
    with handle:
        if not _lock(handle):
            other = _read(state_dir)
            at = f" at {other.url}, pid {other.pid}" if other else ""
            raise ConfigError(f"a stack runs already{at}: stop it, or give this one its own --state-dir "
                              f"(in use: {state_dir})", param="state_dir") from None
        try:
            (state_dir / "stack.json").unlink(missing_ok=True)  # that of a dead one
            yield
        finally:
            (state_dir / "stack.json").unlink(missing_ok=True)


def _lock(handle: TextIO) -> bool:
    """Tries for a moment: a reader that only looks holds a shared lock for microseconds."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_LOCK_RETRY_S)
    return False


def _is_locked(state_dir: Path) -> bool:
    try:
        with (state_dir / "stack.lock").open("r") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read(state_dir: Path) -> StackState | None:
    try:
        raw = json.loads((state_dir / "stack.json").read_text())
        raw["processes"] = {name: ProcessState(**each) for name, each in raw["processes"].items()}
        return StackState(**raw)
    except (OSError, ValueError, TypeError, KeyError):
        return None
