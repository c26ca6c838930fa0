from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.outside_clients import CLIENTS, agreement, measure
from common.errors import ConfigError


@pytest.mark.parametrize(("mean", "exported", "ok"), [
    (109.0, 100.0, True), (111.0, 100.0, False), (89.0, 100.0, False), (9.0, 5.0, True), (11.0, 5.0, False),
    (50.0, 50.0, True),
])
def test_means_agree_within_a_tenth_or_5_ms(mean: float, exported: float, ok: bool) -> None:
    assert agreement("client", mean, exported).ok is ok


def test_the_mean_ttft_is_read_from_each_clients_report(tmp_path: Path) -> None:
    (tmp_path / "guidellm.json").write_text(json.dumps(
        {"benchmarks": [{"metrics": {"time_to_first_token_ms": {"successful": {"mean": 12.5, "count": 4}}}}]}))
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps({"time_to_first_token": {"avg": 13.5, "count": 4}}))
    assert CLIENTS["guidellm"].mean(tmp_path) == (12.5, 4)
    assert CLIENTS["aiperf"].mean(tmp_path) == (13.5, 4)


def test_a_client_that_is_not_installed_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--install"):
        measure(tmp_path, quick=True, install=False, only=["aiperf"], folder=tmp_path)
