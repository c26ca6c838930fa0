"""What a trace shows of a decision."""

from __future__ import annotations

from router_svc.decisions import Decision
from router_svc.pricing import Priced
from router_svc.service import MAX_SHOWN_CANDIDATES, _facts
from tests.unit.router_svc.builders import worker


def test_a_span_shows_the_first_of_many_candidates_and_how_many_there_are() -> None:
    candidates = tuple(Priced(worker(f"d{i}"), None, 0, predicted_ttft_s=i) for i in range(500))
    facts = _facts(Decision("d", "r", "m", 1, 10, candidates, chosen=499))
    assert facts["shoal.route.num_candidates"] == 500
    assert facts["shoal.route.candidates"] == [f"d{i}" for i in range(MAX_SHOWN_CANDIDATES)]
    assert len(facts["shoal.route.predicted_ttft_s"]) == MAX_SHOWN_CANDIDATES == 32  # type: ignore[arg-type]
    assert facts["shoal.route.choice"] == "d499"
