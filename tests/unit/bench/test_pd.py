from __future__ import annotations

import pytest

from bench.pd import figures


def test_the_ratio_is_of_the_medians_and_above_one_where_the_separate_workers_use_less() -> None:
    (figure,) = figures({1: [(2.0, 3.0), (4.0, 6.0), (90.0, 6.0)]})
    assert (figure.value, figure.peer_value) == (4.0, 6.0)
    assert figure.ratio == pytest.approx(1.5)


@pytest.mark.parametrize(("used", "ok"), [(1.19, True), (1.21, False)])
def test_a_fifth_more_than_the_mixed_worker_is_the_limit(used: float, ok: bool) -> None:
    assert figures({1: [(used, 1.0)]})[0].ok is ok
    assert figures({6: [(used, 1.0)]})[0].ok is None
