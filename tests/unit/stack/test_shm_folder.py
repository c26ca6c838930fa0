from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from stack.shm_folder import hold_shm_dir


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def killed_holder(state_dir: Path, memory: Path) -> Path:
    """The folder that a supervisor left which was killed while it held it."""
    code = ("import os, signal, sys; from pathlib import Path; from stack.shm_folder import hold_shm_dir\n"
            "with hold_shm_dir(Path(sys.argv[1]), Path(sys.argv[2])) as folder:\n"
            "    (folder / 'kv.segment').write_bytes(b'x')\n"
            "    print(folder, flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n")
    done = subprocess.run([sys.executable, "-c", code, str(state_dir), str(memory)], capture_output=True, text=True,
                          check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return Path(done.stdout.strip())


def test_each_state_folder_has_its_own_and_it_goes_at_the_end(tmp_path: Path, memory: Path) -> None:
    with hold_shm_dir(tmp_path / "a", memory) as a, hold_shm_dir(tmp_path / "b", memory) as b:
        assert a != b
        (a / "kv.segment").write_bytes(b"x")
        assert (b.stat().st_mode & 0o777, list(b.iterdir())) == (0o700, [])
    assert list(memory.iterdir()) == []


def test_the_folder_of_a_running_stack_is_left_alone(tmp_path: Path, memory: Path) -> None:
    with hold_shm_dir(tmp_path / "a", memory) as a:
        (a / "kv.segment").write_bytes(b"x")
        with hold_shm_dir(tmp_path / "b", memory):
            assert (a / "kv.segment").read_bytes() == b"x"
        assert (a / "kv.segment").exists()


def test_what_a_killed_stack_left_is_taken_away_by_the_next_one_that_starts(tmp_path: Path, memory: Path) -> None:
    left = killed_holder(tmp_path / "dead", memory)
    assert (left / "kv.segment").exists()
    with hold_shm_dir(tmp_path / "other", memory):
        assert not left.exists()


def test_a_stack_that_starts_after_its_own_kill_finds_its_folder_empty(tmp_path: Path, memory: Path) -> None:
    left = killed_holder(tmp_path / "dead", memory)
    with hold_shm_dir(tmp_path / "dead", memory) as again:
        assert again == left
        assert list(again.iterdir()) == []


def test_folders_that_are_not_a_stacks_are_left_alone(tmp_path: Path, memory: Path) -> None:
    others = [memory / f"shoal-{os.getuid()}", memory / f"shoal-{os.getuid() + 1}-ab", memory / "else"]
    for folder in others:
        folder.mkdir()
    with hold_shm_dir(tmp_path / "a", memory):
        assert all(folder.exists() for folder in others)


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: memory.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="another user made it"), hold_shm_dir(tmp_path / "a", memory):
        pass


def test_without_shared_memory_the_start_ends_with_its_name(tmp_path: Path) -> None:
    where = tmp_path / "absent"
    with pytest.raises(ConfigError, match=r"no shared memory at .*/absent/shoal-"), hold_shm_dir(tmp_path, where):
        pass
