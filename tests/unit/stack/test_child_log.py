from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from stack import child_log
from stack.child_log import ChildLog
from stack.console import Console


async def written(log: ChildLog, *parts: bytes) -> None:
    end = await log.open()
    for part in parts:
        os.write(end, part)
    os.close(end)
    await log.finish(5)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


async def test_lines_reach_the_file_the_console_and_the_tail(tmp_path: Path) -> None:
    out = io.StringIO()
    log = ChildLog("x", tmp_path, Console(verbose=True, out=out))
    await written(log, b"one\ntw", b"o\nlast without end")
    log.close()
    assert (tmp_path / "x.log").read_text() == "one\ntwo\nlast without end\n"
    assert [line.split("| ")[1] for line in out.getvalue().splitlines()] == ["one", "two", "last without end"]
    assert log.tail() == "  one\n  two\n  last without end"


async def test_the_tail_is_short_and_of_the_latest_life_only(tmp_path: Path) -> None:
    log = ChildLog("x", tmp_path, Console(out=io.StringIO()))
    await written(log, b"old\n")
    await written(log, b"".join(b"%d\n" % i for i in range(40)))
    log.close()
    assert log.tail().split() == [str(i) for i in range(25, 40)]


async def test_a_full_file_is_put_aside_once_so_logs_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_log, "_FILE_BYTES", 1000)
    log = ChildLog("x", tmp_path, Console(out=io.StringIO()))
    await written(log, b"".join(b"line %04d\n" % i for i in range(500)))
    log.close()
    kept = contents(tmp_path)
    assert sorted(kept) == ["x.log", "x.log.1"]
    assert sum(map(len, kept.values())) <= 2100
    assert "line 0499" in "".join(kept.values())


async def test_a_line_without_end_is_cut_and_not_collected_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_log, "_LINE_BYTES", 100)
    log = ChildLog("x", tmp_path, Console(out=io.StringIO()))
    await written(log, b"a" * 30_000)
    log.close()
    assert (tmp_path / "x.log").read_text().count("a") == 30_000
    assert len((tmp_path / "x.log").read_text().splitlines()[0]) >= 100
