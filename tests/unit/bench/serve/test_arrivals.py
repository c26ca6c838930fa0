from __future__ import annotations

import numpy as np
import pytest

from bench.serve import workloads
from bench.serve.arrivals import arrival_times, spread


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness: float) -> None:
    gaps = np.diff(arrival_times(20_000, 8.0, burstiness, seed=1))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.1)


def test_poisson_counts_in_windows_vary_as_much_as_their_mean() -> None:
    times = np.asarray(arrival_times(20_000, 10.0, 1.0, seed=2))
    counts = np.histogram(times, bins=np.arange(0, times[-1], 1.0))[0]
    assert counts.var() / counts.mean() == pytest.approx(1.0, abs=0.15)


def test_the_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    assert arrival_times(50, 3.0, 1.0, 7) == arrival_times(50, 3.0, 1.0, 7)
    assert arrival_times(50, 3.0, 1.0, 7) != arrival_times(50, 3.0, 1.0, 8)


def test_without_a_rate_all_come_at_once_and_with_endless_burstiness_evenly() -> None:
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, float("inf"), 0) == [0.5, 1.0, 1.5, 2.0]


def test_only_first_turns_are_spread() -> None:
    requests = spread(workloads.multi_turn(2, 2, think_s=3.0), 1.0, float("inf"), 0)
    assert [request.arrival for request in requests] == [1.0, 3.0, 2.0, 3.0]
