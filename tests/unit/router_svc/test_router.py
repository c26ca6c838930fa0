from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from prometheus_client import REGISTRY

from common.errors import Overloaded, Unavailable
from common.placement import RequestOutcome
from common.service_record import ServiceRecord
from router_svc.curves import CostCurves, MeasuredCurves
from router_svc.decisions import DecisionLog
from router_svc.index import PrefixIndex
from router_svc.load import LoadReport
from router_svc.overlay import SpeculativeOverlay
from router_svc.placed_ledger import PlacedLedger
from router_svc.pricing import PricingRules
from router_svc.router import NATS_DOWN, REDIS_DOWN, Router
from router_svc.worker_table import WorkerTable
from tests.unit.router_svc.builders import MODEL, chain, directory_of, query, record


class Rig:
    """A router over the given records, with its clock and its missing facts in the test's hand."""

    def __init__(self) -> None:
        self.now, self.degraded = 100.0, ()  # type: tuple[float, tuple[str, ...]]
        self.index = PrefixIndex(1000)
        self.log = DecisionLog(100)

    async def open(self, *records: ServiceRecord, **rules: Any) -> Router:
        directory, _ = await directory_of(*records)
        self.table = WorkerTable(directory, PlacedLedger(), lambda: self.now, stale_s=3)
        return Router(
            self.index, SpeculativeOverlay(5, 1000), self.table, MeasuredCurves(CostCurves(1000.0, 0.01)), self.log,
            PricingRules(**{"local_prefill_tokens": 32, **rules}), lambda: self.degraded, lambda: self.now)


async def test_a_request_goes_where_its_prefix_is_and_the_record_says_why() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    rig.index.store("d1", chain(0, 8))
    placement = router.route(query())
    assert (placement.decode_worker_id, placement.decode_incarnation) == ("d1", "a")
    assert placement.predicted_cached_tokens == 128
    assert placement.predicted_ttft_s == pytest.approx(37 / 1000 + 0.01)
    decision = router.explain("r1")
    assert decision is not None
    assert decision.decision_id == placement.decision_id
    assert [c.decode.worker_id for c in decision.candidates] == ["d0", "d1"]
    assert decision.choice is decision.candidates[1]
    assert decision.degraded == ()


async def test_a_hand_off_names_the_prefill_workers_address_and_life() -> None:
    rig = Rig()
    router = await rig.open(record("d0", role="decode"), record("p0", "prefill", "x", address="10.0.0.2:7"))
    placement = router.route(query())
    assert (placement.prefill_worker_id, placement.prefill_incarnation, placement.prefill_address) == (
        "p0", "x", "10.0.0.2:7")


async def test_a_burst_with_one_long_prefix_stays_together_before_any_event_comes() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    long = query(block_hashes=chain(0, 100), num_prompt_tokens=1610)
    first = router.route(dataclasses.replace(long, request_id="r0"))
    for i in range(1, 5):
        placement = router.route(dataclasses.replace(long, request_id=f"r{i}"))
        assert (placement.decode_worker_id, placement.predicted_cached_tokens) == (first.decode_worker_id, 1600)
    rig.now += 6  # the guess has ended and no event has come
    assert router.route(dataclasses.replace(long, request_id="late")).predicted_cached_tokens == 0


async def test_a_full_worker_hands_a_shared_prefix_on_to_another() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    placed = [router.route(query(f"s{i}")).decode_worker_id for i in range(16)]
    assert {placed.count("d0"), placed.count("d1")} == {8}


async def test_requests_without_a_common_prefix_spread_over_equal_workers() -> None:
    rig = Rig()
    router = await rig.open(*(record(f"d{i}") for i in range(4)))
    placed = [router.route(query(f"r{i}", block_hashes=chain(100 * i, 10))).decode_worker_id for i in range(1, 13)]
    assert {placed.count(f"d{i}") for i in range(4)} == {3}


async def test_with_the_bus_down_placement_goes_by_load_alone_and_says_so() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    rig.index.store("d1", chain(0, 10))
    rig.degraded = (NATS_DOWN,)
    router.on_report(LoadReport("d1", "a", num_running=4, num_waiting_tokens=50), MODEL)
    placement = router.route(query())
    assert (placement.decode_worker_id, placement.predicted_cached_tokens) == ("d0", 0)
    decision = router.explain("r1")
    assert decision is not None
    assert decision.degraded == (NATS_DOWN,)


async def test_with_redis_down_the_index_in_memory_goes_on() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    rig.index.store("d1", chain(0, 10))
    rig.degraded = (REDIS_DOWN,)
    assert router.route(query()).decode_worker_id == "d1"


async def test_no_worker_left_is_unavailable_and_names_the_reasons() -> None:
    rig = Rig()
    router = await rig.open(record("d0"))
    with pytest.raises(Unavailable, match="d0: this request has failed there"):
        router.route(query(exclude=("d0",)))
    with pytest.raises(Unavailable, match="no worker of model 'other'"):
        router.route(query(model="other"))
    refused = router.explain("r1")
    assert refused is not None
    assert refused.chosen is None


async def test_a_request_whose_deadline_cannot_be_met_is_refused_at_once_with_a_time_to_come_back() -> None:
    rig = Rig()
    router = await rig.open(record("d0"))
    router.on_report(LoadReport("d0", "a", num_waiting_tokens=9000, prefill_tokens_per_s=1000.0), MODEL)
    with pytest.raises(Overloaded, match=r"4\.0 s are left") as refusal:
        router.route(query(timeout_s=4.0))
    assert refusal.value.retry_after_s == pytest.approx(5.2, abs=0.1)
    assert rig.table.placed.num_entries == 0
    assert router.route(query(timeout_s=60.0)).decode_worker_id == "d0"
    assert router.route(query()).decode_worker_id == "d0"  # 0: no deadline


async def test_an_outcome_joins_the_record_and_frees_what_was_placed() -> None:
    rig = Rig()
    router = await rig.open(record("d0", role="decode"), record("p0", "prefill"))
    placement = router.route(query())
    assert rig.table.placed.num_entries == 2
    outcome = RequestOutcome("r1", MODEL, placement.decision_id, "d0", "p0", ttft_s=0.25, e2e_s=1.0)
    router.on_outcome(outcome)
    decision = router.explain("r1")
    assert decision is not None
    assert decision.outcome == outcome
    assert rig.table.placed.num_entries == 0


async def test_a_migrated_request_frees_its_place_on_the_worker_it_was_lost_on() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    first = router.route(query())
    second = router.route(query(exclude=(first.decode_worker_id,), attempt=1))
    assert second.decode_worker_id != first.decode_worker_id
    router.on_worker_ended(first.decode_worker_id)
    router.on_outcome(RequestOutcome("r1", MODEL, second.decision_id, second.decode_worker_id, attempts=2))
    assert rig.table.placed.num_entries == 0


async def test_a_life_that_ended_leaves_no_guess_behind() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    first = router.route(query("r1")).decode_worker_id
    router.on_worker_ended(first)
    assert router.route(query("r2")).predicted_cached_tokens == 0


async def test_measured_rates_of_one_worker_price_another_that_has_measured_nothing() -> None:
    rig = Rig()
    router = await rig.open(record("d0"), record("d1"))
    router.on_report(LoadReport("d0", "a", prefill_tokens_per_s=8000.0, step_s=0.002), MODEL)
    placement = router.route(dataclasses.replace(query(), exclude=("d0",)))
    assert placement.predicted_ttft_s == pytest.approx(165 / 8000 + 0.002)


async def test_predicted_and_actual_times_of_a_request_are_counted_together() -> None:
    def count(name: str) -> float:
        return REGISTRY.get_sample_value(f"shoal_router_{name}", {"source": "local"}) or 0.0

    rig = Rig()
    router = await rig.open(record("d0"))
    placement = router.route(query())
    decision = router.explain("r1")
    assert decision is not None
    assert decision.choice is not None
    assert decision.choice.source == "local"
    before = [count(f"{name}_ttft_seconds_sum") for name in ("predicted", "actual")]
    error = count("ttft_error_seconds_sum")
    router.on_outcome(RequestOutcome("r1", MODEL, placement.decision_id, "d0", ttft_s=5.0, e2e_s=6.0))
    predicted, actual = (count(f"{name}_ttft_seconds_sum") - was for name, was in zip(
        ("predicted", "actual"), before, strict=True))
    assert predicted == pytest.approx(placement.predicted_ttft_s)
    assert actual == pytest.approx(5.0)
    assert count("ttft_error_seconds_sum") - error == pytest.approx(5.0 - placement.predicted_ttft_s)


async def test_refusals_are_counted_by_reason() -> None:
    def count(reason: str) -> float:
        return REGISTRY.get_sample_value("shoal_router_refused_total", {"reason": reason}) or 0.0

    before = {reason: count(reason) for reason in ("no worker", "no candidate", "deadline")}
    with pytest.raises(Unavailable):
        (await Rig().open()).route(query())
    with pytest.raises(Overloaded):
        (await Rig().open(record("d0"))).route(query(timeout_s=0.001))
    assert [count(reason) - was for reason, was in before.items()] == [1, 0, 1]
