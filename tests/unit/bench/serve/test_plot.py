from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.serve.plot import plot, require_matplotlib
from bench.serve.record import Outcome, RequestRecord
from common.errors import ConfigError


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"shoal\[bench\]"):
        require_matplotlib()


def test_a_run_without_any_completed_request_still_makes_a_picture(tmp_path: Path) -> None:
    plot(tmp_path / "p.png", "t", [RequestRecord(0, 1, 1, outcome=Outcome.FAILED, end_s=1.0)])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
