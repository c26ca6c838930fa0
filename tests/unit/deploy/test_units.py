"""Numbers of a dashboard's picture."""

from __future__ import annotations

import math

import pytest

from deploy.grafana.units import formatted


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0.0123, "s", "12.3 ms"), (0.0005, "s", "500 µs"), (0, "s", "0 s"), (0.99999, "s", "1 s"), (75, "s", "1.25 min"),
    (1536, "bytes", "1.5 KiB"), (2.5e9, "Bps", "2.5 GB/s"), (0.9876, "percentunit", "98.8%"),
    (1, "percentunit", "100%"),
    (1234, "short", "1.23 K"), (42, "short", "42"), (0.004, "short", "0.004"), (0, "short", "0"),
    (12.34, "reqps", "12.3 req/s"), (3, "celsius", "3 celsius"), (math.nan, "s", "–"), (math.inf, "s", "∞"),
])
def test_a_number_has_three_digits_and_the_prefix_that_fits(value: float, unit: str, text: str) -> None:
    assert formatted(value, unit) == text


def test_decimals_that_a_panel_asks_for_are_kept() -> None:
    assert formatted(1, "percentunit", 2) == "100.00%"
