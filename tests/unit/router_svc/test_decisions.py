from __future__ import annotations

from common.placement import RequestOutcome
from router_svc.decisions import MAX_KEPT_CANDIDATES, Decision, DecisionLog, shortened
from router_svc.pricing import Priced
from tests.unit.router_svc.builders import worker


def decision(number: int, request_id: str = "") -> Decision:
    return Decision(f"d{number}", request_id or f"r{number}", "m", 0, 10, (), None)


def test_an_outcome_joins_its_decision_and_one_of_another_router_is_passed_over() -> None:
    log = DecisionLog(10)
    log.record(decision(1))
    outcome = RequestOutcome("r1", "m", decision_id="d1", ttft_s=0.5)
    joined = log.add_outcome(outcome)
    assert joined is not None
    assert joined.outcome == outcome
    assert log.find("r1") == joined
    assert log.add_outcome(RequestOutcome("r9", "m", decision_id="d9")) is None


def test_the_last_attempt_of_a_request_is_the_one_that_is_explained() -> None:
    log = DecisionLog(10)
    log.record(decision(1, "r"))
    log.record(decision(2, "r"))
    found = log.find("r")
    assert found is not None
    assert found.decision_id == "d2"


def test_the_log_is_bounded_and_drops_the_oldest_without_losing_a_later_attempt() -> None:
    log = DecisionLog(3)
    log.record(decision(1, "r"))
    for number in (2, 3):
        log.record(decision(number))
    log.record(decision(4, "r"))
    assert len(log) == 3
    found = log.find("r")
    assert found is not None
    assert found.decision_id == "d4"
    for number in (5, 6, 7):
        log.record(decision(number))
    assert len(log) == 3
    assert log.find("r") is None
    assert log.find("r2") is None


def test_a_long_list_of_candidates_keeps_the_chosen_one_and_the_soonest() -> None:
    candidates = [Priced(worker(f"d{i}"), None, 0, predicted_ttft_s=float(i)) for i in range(50)]
    kept, chosen = shortened(candidates, 40)
    assert len(kept) == MAX_KEPT_CANDIDATES
    assert chosen is not None
    assert kept[chosen] is candidates[40]
    assert [c.decode.worker_id for c in kept[:-1]] == [f"d{i}" for i in range(MAX_KEPT_CANDIDATES - 1)]
    assert shortened(candidates[:5], None) == (tuple(candidates[:5]), None)
