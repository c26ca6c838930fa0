from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import NotFound, Unavailable
from common.service_record import ServiceRecord
from stack import status
from stack.state_file import ProcessState


@pytest.fixture(autouse=True)
def metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def scrape(address: str) -> dict[str, float]:
        if address == "dead:1":
            raise Unavailable("no metrics")
        return {"shoal_requests_running": 2.0, "unrelated": 1.0}

    monkeypatch.setattr(status, "scrape", scrape)


def record(service_id: str, metrics_address: str = "live:1", state: str = "ready") -> ServiceRecord:
    return ServiceRecord("decode", service_id, "i", "a:1", metrics_address, ("m",), "mixed", state=state)


def test_a_registered_service_is_up_with_its_load_and_restarts() -> None:
    (row,) = status.rows_of([record("decode-0")], {"decode-0": ProcessState("ready", 1, 3)})
    assert (row.up, row.state, row.load, row.restarts, row.models) == (True, "ready", {"running": 2.0}, 3, ("m",))


def test_a_service_whose_metrics_do_not_answer_is_down() -> None:
    (row,) = status.rows_of([record("decode-0", "dead:1")], {})
    assert (row.up, row.state) == (False, "no metrics")


def test_a_dead_process_is_down_although_its_lease_still_stands() -> None:
    (row,) = status.rows_of([record("decode-0")], {"decode-0": ProcessState("down")})
    assert (row.up, row.state) == (False, "down")


def test_a_process_that_is_not_registered_is_listed_as_down() -> None:
    rows = status.rows_of([], {"decode-0": ProcessState("ready", 7), "nats": ProcessState("ready", 8)})
    assert [(row.service, row.service_id, row.state, row.up) for row in rows] == [
        ("decode", "decode-0", "not registered", False)]


def test_servers_that_do_not_answer_are_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert not status.print_status(None, "redis://127.0.0.1:9/0", "nats://127.0.0.1:9", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [(row["service"], row["up"]) for row in said["services"]] == [("redis", False), ("nats", False)]


def test_without_a_stack_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no stack runs here"):
        status.print_status(tmp_path, "", "", as_json=False)
