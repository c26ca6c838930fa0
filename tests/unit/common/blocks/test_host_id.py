from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.blocks.host_id import default_shm_dir, host_id, open_shm_dir


def test_processes_that_see_one_folder_agree_and_others_differ(tmp_path: Path) -> None:
    mine = host_id(open_shm_dir(tmp_path / "a"))
    theirs = subprocess.run(
        [sys.executable, "-c", f"from common.blocks.host_id import host_id; print(host_id({str(tmp_path / 'a')!r}))"],
        check=True, capture_output=True, text=True).stdout.strip()
    assert mine == theirs
    assert mine != host_id(open_shm_dir(tmp_path / "b"))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert mine == host_id(tmp_path / "link")


def test_a_folder_is_its_owners_alone_and_must_exist_to_have_an_id(tmp_path: Path) -> None:
    assert open_shm_dir(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileNotFoundError):
        host_id(tmp_path / "absent")


def test_without_a_name_the_folder_is_the_users_own_in_memory() -> None:
    assert str(default_shm_dir()).startswith("/dev/shm/shoal-")
