from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError, NotFound
from stack.state_file import ProcessState, StackState, claim, find_stack

STATE = StackState(42, "ready", "http://127.0.0.1:8000", "m", "nats://u:secret@n", "redis://r", "/logs",
                   {"decode-0": ProcessState("ready", 43, 1, "127.0.0.1:1", "127.0.0.1:2", "abc")})


def test_what_is_saved_is_found_while_the_folder_is_claimed(tmp_path: Path) -> None:
    with claim(tmp_path):
        STATE.save(tmp_path)
        assert find_stack(tmp_path) == STATE
    with pytest.raises(NotFound, match="no stack runs here"):
        find_stack(tmp_path)
    assert not (tmp_path / "stack.json").exists()


def test_the_file_of_a_dead_supervisor_is_not_a_running_stack(tmp_path: Path) -> None:
    code = ("import os, sys; from pathlib import Path; from stack.state_file import *\n"
            "with claim(Path(sys.argv[1])):\n"
            "    StackState(1, 'ready', 'u', 'm', 'n', 'r', 'l').save(Path(sys.argv[1])); os._exit(9)")
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert (tmp_path / "stack.json").exists()
    with pytest.raises(NotFound):
        find_stack(tmp_path)
    with claim(tmp_path), pytest.raises(NotFound):  # nor is it the new owner's before that one has said a word
        find_stack(tmp_path)


def test_a_second_stack_in_the_same_folder_is_refused_and_told_where_the_first_is(tmp_path: Path) -> None:
    with claim(tmp_path):
        STATE.save(tmp_path)
        with pytest.raises(ConfigError, match=r"runs already at http://127\.0\.0\.1:8000, pid 42"), claim(tmp_path):
            pass
        assert find_stack(tmp_path) == STATE


def test_the_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    STATE.save(tmp_path)
    assert stat.S_IMODE((tmp_path / "stack.json").stat().st_mode) == 0o600


def test_a_state_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--state-dir"), claim(tmp_path / "file" / "below"):
        pass
