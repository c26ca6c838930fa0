from __future__ import annotations

from pathlib import Path

import pytest

from common.blocks.segment import Segment
from common.blocks.spare_segments import SpareSegments


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_segment_that_is_given_back_serves_again_under_a_new_name_and_the_old_name_is_gone(tmp_path: Path) -> None:
    spares = SpareSegments(tmp_path)
    first = spares.take(tmp_path / "a.segment", 100_000)
    first.view(0, 3)[:] = b"abc"
    file_id = first.file_id
    spares.give_back(first)
    assert not (tmp_path / "a.segment").exists()
    second = spares.take(tmp_path / "b.segment", 120_000)
    assert second.file_id == file_id
    assert names(tmp_path) == ["b.segment"]
    spares.give_back(second)
    spares.close()
    assert names(tmp_path) == []


def test_one_in_use_or_too_small_is_not_taken_again(tmp_path: Path) -> None:
    spares = SpareSegments(tmp_path)
    small = spares.take(tmp_path / "a.segment", 1000)
    other = spares.take(tmp_path / "b.segment", 1000)
    assert small.file_id != other.file_id
    spares.give_back(small)
    large = spares.take(tmp_path / "c.segment", 1 << 20)
    assert large.file_id not in (small.file_id, other.file_id)
    assert large.num_bytes >= 1 << 20
    for segment in (large, other):
        spares.give_back(segment)
    spares.close()


def test_the_smallest_that_fits_is_taken(tmp_path: Path) -> None:
    spares = SpareSegments(tmp_path)
    segments = [spares.take(tmp_path / f"{size}.segment", size) for size in (1 << 20, 1 << 17, 1 << 18)]
    for segment in segments:
        spares.give_back(segment)
    assert spares.take(tmp_path / "again.segment", 100_000).num_bytes == 1 << 17
    spares.close()


def test_spares_beyond_the_limit_are_dropped_the_oldest_first(tmp_path: Path) -> None:
    spares = SpareSegments(tmp_path, max_bytes=2 << 17)
    segments: list[Segment] = [spares.take(tmp_path / f"{i}.segment", 1 << 17) for i in range(3)]
    for segment in segments:
        spares.give_back(segment)
    assert spares.num_bytes == 2 << 17
    assert not segments[0].path.exists()
    assert len(names(tmp_path)) == 2
    spares.close()


def test_spares_of_two_processes_with_the_same_id_do_not_take_each_others_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in containers, where each service is process 1, and a segment may lie at the same address in both."""
    monkeypatch.setattr("common.blocks.spare_segments.id", lambda _: 1, raising=False)
    one, two = SpareSegments(tmp_path), SpareSegments(tmp_path)
    first, second = one.take(tmp_path / "a.segment", 1000), two.take(tmp_path / "b.segment", 1000)
    one.give_back(first)
    two.give_back(second)
    assert len(names(tmp_path)) == 2
    assert first.path != second.path
    one.close()
    assert names(tmp_path) == [second.path.name]
    two.close()
