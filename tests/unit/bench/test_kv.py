from __future__ import annotations

import pytest

from bench.kv import FIRST, GET, HAND_OFF, PUT, figures

NUM_BYTES = 256 * 737_280


def test_a_figure_is_the_median_rate_beside_that_of_its_own_copies() -> None:
    ways = {name: [(2.0, 1.0), (4.0, 1.0), (100.0, 9.0)] for name in (PUT, GET, *HAND_OFF.values(), FIRST)}
    for figure in figures(ways):
        assert figure.value == pytest.approx(NUM_BYTES / 4.0 / 1e9)
        assert figure.peer_value == pytest.approx(NUM_BYTES / 1.0 / 1e9)
        assert figure.ratio == pytest.approx(0.25)


def test_only_the_ways_through_shared_memory_must_reach_a_part_of_the_copy() -> None:
    ways = {name: [(3.0, 1.0)] for name in (PUT, GET, *HAND_OFF.values(), FIRST)}
    assert [figure.ok for figure in figures(ways)] == [False, False, False, None, None]
