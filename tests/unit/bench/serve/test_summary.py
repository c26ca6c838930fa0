from __future__ import annotations

import math

import pytest

from bench.serve.record import Outcome, RequestRecord
from bench.serve.summary import max_concurrent, summarize, tokens_by_second


def record(
    sent: float, chunks: list[float], end: float, tokens: int, outcome: Outcome = Outcome.COMPLETED
) -> RequestRecord:
    return RequestRecord(0, 10, tokens, outcome=outcome, sent_s=sent, chunk_s=chunks, end_s=end,
                         num_output_tokens=tokens)


RECORDS = [
    record(0.0, [0.5, 1.5], 1.6, 3),
    record(1.0, [1.2, 1.4, 1.6], 2.0, 3),
    record(1.0, [1.1], 9.0, 50, Outcome.ABORTED),
    record(1.0, [], 1.1, 0, Outcome.REFUSED),
]


def test_only_completed_requests_are_in_the_figures() -> None:
    summary = summarize(RECORDS, 4.0, (50, 100), {})
    assert (summary.completed, summary.not_completed) == (2, 2)
    assert summary.outcomes[Outcome.ABORTED] == summary.outcomes[Outcome.REFUSED] == 1
    assert (summary.total_input_tokens, summary.total_output_tokens) == (20, 6)
    ttft, itl, tpot = (summary.spreads[name] for name in ("ttft", "itl", "tpot"))
    assert (ttft.mean, ttft.percentiles[100]) == pytest.approx((350.0, 500.0))
    assert (itl.mean, itl.median) == pytest.approx(((1000 + 200 + 200) / 3, 200.0))
    assert tpot.mean == pytest.approx((500 + 200) / 2)
    assert summary.goodput is None


def test_goodput_counts_requests_that_keep_all_limits() -> None:
    assert summarize(RECORDS, 4.0, (50,), {"ttft": 500.0}).goodput == 2 / 4
    assert summarize(RECORDS, 4.0, (50,), {"ttft": 500.0, "tpot": 200.1}).goodput == 1 / 4
    assert summarize(RECORDS, 4.0, (50,), {"ttft": 500.0, "tpot": 200.1, "e2el": 999.0}).goodput == 0


def test_most_at_once_counts_also_what_did_not_complete_and_touching_ones_do_not_overlap() -> None:
    assert max_concurrent(RECORDS) == 4
    assert max_concurrent([record(0, [], 1, 0), record(1, [], 2, 0)]) == 1


def test_tokens_of_a_request_are_spread_over_its_chunks() -> None:
    assert tokens_by_second(RECORDS[:2]) == [1.5, 4.5]


def test_without_a_completed_request_latencies_are_nan() -> None:
    summary = summarize(RECORDS[2:], 4.0, (50,), {"ttft": 1.0})
    assert math.isnan(summary.spreads["ttft"].mean)
    assert (summary.completed, summary.goodput, summary.max_output_tokens_per_s) == (0, 0.0, 0.0)
