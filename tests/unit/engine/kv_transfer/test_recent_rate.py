"""A rate is of lately, or unknown."""

from __future__ import annotations

import pytest

from engine.kv_transfer.recent_rate import RecentRate


def test_it_is_unknown_before_the_first_copy_and_long_after_the_last() -> None:
    now = 100.0
    rate = RecentRate(10.0, lambda: now)
    assert rate.bytes_per_s == 0.0
    rate.add(500, 0.5)
    assert rate.bytes_per_s == pytest.approx(1000.0)
    now += 9.9
    assert rate.bytes_per_s == pytest.approx(1000.0)
    now += 0.2
    assert rate.bytes_per_s == 0.0


def test_newer_copies_count_more() -> None:
    now = 0.0
    rate = RecentRate(10.0, lambda: now)
    rate.add(1000, 1.0)
    now = 10.0
    rate.add(3000, 1.0)
    assert 2000.0 < rate.bytes_per_s < 3000.0
