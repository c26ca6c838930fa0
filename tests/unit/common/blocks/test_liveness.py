from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.blocks.liveness import Liveness, is_alive
from common.errors import InvalidRequest

HOLDER = """
import sys
from pathlib import Path
from common.blocks.liveness import Liveness
held = Liveness.hold(Path(sys.argv[1]), "other")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_name_lives_from_hold_to_release(tmp_path: Path) -> None:
    assert not is_alive(tmp_path, "w-1")
    held = Liveness.hold(tmp_path, "w-1")
    assert is_alive(tmp_path, "w-1")
    with pytest.raises(BlockingIOError):
        Liveness.hold(tmp_path, "w-1")
    held.release()
    held.release()
    assert not is_alive(tmp_path, "w-1")
    assert not list(tmp_path.iterdir())


def test_a_stopped_process_is_alive_and_a_killed_one_is_not(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdin is not None
    try:
        other.stdout.readline()
        other.send_signal(signal.SIGSTOP)
        assert is_alive(tmp_path, "other")
        other.send_signal(signal.SIGKILL)
        other.wait(10)
        assert not is_alive(tmp_path, "other")
    finally:
        other.kill()
        other.wait(10)
        other.stdin.close()
        other.stdout.close()


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 129, "a b"])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        is_alive(tmp_path, name)
