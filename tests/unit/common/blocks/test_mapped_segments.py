from __future__ import annotations

from pathlib import Path

import pytest

from common.blocks.mapped_segments import MappedSegments
from common.blocks.segment import Segment


def test_a_file_is_mapped_once_however_often_it_is_renamed(tmp_path: Path) -> None:
    owner, mapped = Segment.create(tmp_path / "a.segment", 4096), MappedSegments()
    first = mapped.take(tmp_path / "a.segment")
    mapped.give_back(first)
    owner.rename(tmp_path / "b.segment")
    again = mapped.take(tmp_path / "b.segment")
    assert again is first
    again.view(0, 2)[:] = b"hi"
    assert bytes(owner.view(0, 2)) == b"hi"
    with pytest.raises(FileNotFoundError):
        mapped.take(tmp_path / "a.segment")
    mapped.give_back(again)
    mapped.close()
    owner.unlink()


def test_a_file_in_use_is_mapped_a_second_time_and_only_one_mapping_is_kept(tmp_path: Path) -> None:
    owner, mapped = Segment.create(tmp_path / "a.segment", 4096), MappedSegments()
    first, second = (mapped.take(owner.path) for _ in range(2))
    assert first is not second
    mapped.give_back(first)
    mapped.give_back(second)
    assert mapped.num_idle == 1
    with pytest.raises(ValueError, match="closed"):
        second.view(0, 1)
    mapped.close()
    owner.unlink()


def test_an_unlinked_file_is_let_go_and_another_of_its_name_is_mapped_anew(tmp_path: Path) -> None:
    mapped = MappedSegments()
    old = Segment.create(tmp_path / "a.segment", 4096)
    mapped.give_back(mapped.take(old.path))
    old.unlink()
    new = Segment.create(tmp_path / "a.segment", 8192)
    assert mapped.take(new.path).num_bytes == 8192
    assert mapped.num_idle == 0
    mapped.close()
    new.unlink()


def test_no_more_than_the_limit_stay_idle(tmp_path: Path) -> None:
    mapped = MappedSegments(max_idle=2)
    owners = [Segment.create(tmp_path / f"{i}.segment", 4096) for i in range(3)]
    taken = [mapped.take(owner.path) for owner in owners]
    for segment in taken:
        mapped.give_back(segment)
    assert mapped.num_idle == 2
    assert mapped.take(owners[2].path) is taken[2]
    mapped.close()
    for owner in owners:
        owner.unlink()
