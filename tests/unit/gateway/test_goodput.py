"""Which requests count for the objective, and which limits they miss."""

from __future__ import annotations

from prometheus_client import REGISTRY

from gateway.goodput import FAILURE, TPOT, TTFT, SloLimits

SLO = SloLimits(ttft_s=1.0, tpot_s=.1)


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"shoal_gateway_slo_{name}", {"model": "slo-test", **labels}) or 0.0


def test_a_limit_is_missed_only_above_it_and_only_when_it_is_set() -> None:
    assert SLO.missed(1.0, .1, failed=False) == []
    assert SLO.missed(1.01, .11, failed=False) == [TTFT, TPOT]
    assert SLO.missed(None, None, failed=False) == [], "an answer in one piece is judged by its success"
    assert SLO.missed(None, None, failed=True) == [FAILURE]
    assert SloLimits().missed(100, 100, failed=False) == []


def test_every_series_of_a_model_is_there_from_its_first_request() -> None:
    SLO.judge("slo-test", .5, .05, failed=False)
    SLO.judge("slo-test", 2, .05, failed=False)
    assert (value("requests_total"), value("good_total")) == (2, 1)
    assert [value("missed_total", limit=limit) for limit in (TTFT, TPOT, FAILURE)] == [1, 0, 0]
    assert REGISTRY.get_sample_value(
        "shoal_gateway_slo_missed_total", {"model": "slo-test", "limit": FAILURE}) == 0
