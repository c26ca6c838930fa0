from __future__ import annotations

import pytest

from common.errors import Unavailable
from common.service_record import ServiceRecord
from stack import service_rows
from stack.scrape import Sample
from stack.service_rows import rows_of
from stack.state_file import ProcessState


@pytest.fixture(autouse=True)
def metrics(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Sample]]:
    """Address → samples; a test may put its own in."""
    known = {"live:1": [Sample("shoal_requests_running", {"model_name": "m"}, 2.0), Sample("unrelated", {}, 1.0)]}

    def samples(address: str) -> list[Sample]:
        if address not in known:
            raise Unavailable("no metrics")
        return known[address]

    monkeypatch.setattr(service_rows, "samples", samples)
    return known


def record(service_id: str, metrics_address: str = "live:1", state: str = "ready", service: str = "decode",
           ) -> ServiceRecord:
    return ServiceRecord(service, service_id, "i", "a:1", metrics_address, ("m",), "mixed", state=state,
                         transports=("shm", "grpc"))


def test_a_registered_service_is_up_with_its_load_transports_and_restarts() -> None:
    (row,) = rows_of([record("mixed-0")], {"mixed-0": ProcessState("ready", 1, 3)})
    assert (row.up, row.state, row.load, row.restarts, row.models) == (True, "ready", {"running": 2.0}, 3, ("m",))
    assert (row.role, row.transports) == ("mixed", ("shm", "grpc"))


def test_a_service_whose_metrics_do_not_answer_is_down() -> None:
    (row,) = rows_of([record("mixed-0", "dead:1")], {})
    assert (row.up, row.state) == (False, "no metrics")


def test_a_dead_process_is_down_although_its_lease_still_stands() -> None:
    (row,) = rows_of([record("mixed-0")], {"mixed-0": ProcessState("down")})
    assert (row.up, row.state) == (False, "down")


def test_a_process_that_is_not_registered_is_listed_as_down() -> None:
    rows = rows_of([], {"mixed-0": ProcessState("ready", 7), "nats": ProcessState("ready", 8)})
    assert [(row.service, row.service_id, row.state, row.up) for row in rows] == [
        ("decode", "mixed-0", "not registered", False)]


def test_a_store_shows_what_each_tier_holds(metrics: dict[str, list[Sample]]) -> None:
    metrics["store:1"] = [
        Sample("shoal_kvstore_blocks", {"tier": "dram"}, 3.0), Sample("shoal_kvstore_blocks", {"tier": "ssd"}, 4.0),
        Sample("shoal_kvstore_used_bytes", {"tier": "dram"}, 30.0),
        Sample("shoal_kvstore_used_bytes", {"tier": "ssd"}, 40.0)]
    (row,) = rows_of([record("kvstore-0", "store:1", service="kvstore")], {})
    assert row.tiers == {"dram": {"blocks": 3.0, "bytes": 30.0}, "ssd": {"blocks": 4.0, "bytes": 40.0}}


def test_a_router_without_a_server_is_degraded_and_says_without_what(metrics: dict[str, list[Sample]]) -> None:
    metrics["router:1"] = [
        Sample("shoal_router_index_blocks", {}, 9.0), Sample("shoal_router_degraded", {"why": "nats"}, 1.0),
        Sample("shoal_router_degraded", {"why": "redis"}, 0.0)]
    (row,) = rows_of([record("router-0", "router:1", service="router")], {})
    assert (row.up, row.state, row.lacks, row.load) == (True, "degraded", ("nats",), {"index blocks": 9.0})


def test_a_router_that_drains_is_draining_whatever_it_lacks(metrics: dict[str, list[Sample]]) -> None:
    metrics["router:1"] = [Sample("shoal_router_degraded", {"why": "nats"}, 1.0)]
    (row,) = rows_of([record("router-0", "router:1", "draining", "router")], {})
    assert (row.up, row.state) == (False, "draining")
