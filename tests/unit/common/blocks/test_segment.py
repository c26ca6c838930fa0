from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.blocks.segment import Segment, remove_stale
from common.errors import InvalidRequest, Overloaded

OWNER = """
import sys
from pathlib import Path
from common.blocks.segment import Segment
segment = Segment.create(Path(sys.argv[1]), 8192)
segment.view(0, 5)[:] = b"hello"
print("made", flush=True)
sys.stdin.read()
"""


def test_what_one_process_writes_another_reads_without_a_copy(tmp_path: Path) -> None:
    owner = Segment.create(tmp_path / "a.segment", 8192)
    reader = Segment.open(tmp_path / "a.segment")
    view = reader.view(4096, 3)
    owner.view(4096, 3)[:] = b"abc"
    assert bytes(view) == b"abc"
    assert reader.num_bytes == 8192
    for segment in (owner, reader):
        segment.close()


def test_a_view_outlives_its_segment_and_the_name(tmp_path: Path) -> None:
    owner = Segment.create(tmp_path / "a.segment", 4096)
    view = owner.view(0, 4)
    owner.unlink()
    owner.unlink()
    owner.close()
    owner.close()
    view[:] = b"live"
    assert bytes(view) == b"live"
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="closed"):
        owner.view(0, 1)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (0, 4097), (4096, 1), (1, -1)])
def test_a_view_out_of_bounds_is_refused_with_the_limit(tmp_path: Path, offset: int, num_bytes: int) -> None:
    owner = Segment.create(tmp_path / "a.segment", 4096)
    with pytest.raises(InvalidRequest, match="has 4096 bytes"):
        owner.view(offset, num_bytes)
    owner.close()


def test_a_name_is_made_once_and_pages_are_taken_when_touched(tmp_path: Path) -> None:
    owner = Segment.create(tmp_path / "a.segment", 1 << 20)
    with pytest.raises(FileExistsError):
        Segment.create(tmp_path / "a.segment", 4096)
    assert os.stat(owner.path).st_blocks == 0
    owner.reserve(0, 65_536)
    taken = os.stat(owner.path).st_blocks * 512
    assert 65_536 <= taken < 1 << 20
    owner.reserve(100, 60_000)
    assert os.stat(owner.path).st_blocks * 512 == taken
    with pytest.raises(InvalidRequest, match="outside"):
        owner.reserve(0, 1 << 62)
    owner.close()


def test_memory_that_the_host_does_not_have_is_refused_and_asked_for_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    owner = Segment.create(tmp_path / "a.segment", 1 << 20)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Overloaded, match="no room"):
        owner.reserve(0, 4096)
    monkeypatch.undo()
    owner.reserve(0, 4096)
    assert os.stat(owner.path).st_blocks > 0
    owner.close()


def test_only_segments_of_dead_owners_are_removed(tmp_path: Path) -> None:
    alive = Segment.create(tmp_path / "alive.segment", 4096)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "other.segment")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        owner.stdout.readline()
        assert remove_stale(tmp_path) == 0
        reader = Segment.open(tmp_path / "other.segment")
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert remove_stale(tmp_path) == 1
        assert [path.name for path in tmp_path.iterdir()] == ["alive.segment"]
        assert bytes(reader.view(0, 5)) == b"hello"
        reader.close()
        alive.close()
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdin.close()
        owner.stdout.close()
