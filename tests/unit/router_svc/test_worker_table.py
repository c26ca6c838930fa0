from __future__ import annotations

import dataclasses

from router_svc.load import LoadReport
from router_svc.placed_ledger import PlacedLedger
from router_svc.worker_table import WorkerTable
from tests.unit.router_svc.builders import MODEL, directory_of, record


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def table_of(*records: object) -> tuple[WorkerTable, Clock]:
    directory, _ = await directory_of(*records)  # type: ignore[arg-type]
    clock = Clock()
    return WorkerTable(directory, PlacedLedger(settle_s=0.3, ttl_s=60), clock, stale_s=3), clock


REPORT = LoadReport("d0", "a", num_running=2, num_waiting_tokens=500, num_blocks=1000, num_free_blocks=7, step_s=0.02,
                    prefill_tokens_per_s=900.0)


async def test_what_was_placed_counts_until_a_report_that_can_know_of_it() -> None:
    table, clock = await table_of(record("d0"))
    table.on_report(REPORT)
    table.placed.place("d0", "r1", 64, clock.now)
    clock.now += 0.1
    table.on_report(REPORT)  # made while the request was still on its way
    (state,) = table.states("decode", MODEL, {"d0": 32})
    assert (state.num_requests, state.queue_tokens, state.cached_tokens) == (3, 564, 32)
    clock.now += 0.3
    table.on_report(dataclasses.replace(REPORT, num_running=3))
    (state,) = table.states("decode", MODEL, {})
    assert (state.num_requests, state.queue_tokens) == (3, 500)


async def test_without_reports_a_worker_is_known_by_what_was_placed_on_it_and_has_not_ended() -> None:
    table, clock = await table_of(record("d0"), record("d1"))
    for request_id in ("r1", "r2"):
        table.placed.place("d0", request_id, 10, clock.now)
    clock.now += 5
    assert [s.num_requests for s in table.states("decode", MODEL, {})] == [2, 0]
    table.placed.ended("r1", "d0", "")
    assert [s.num_requests for s in table.states("decode", MODEL, {})] == [1, 0]
    clock.now += 60
    assert [s.num_requests for s in table.states("decode", MODEL, {})] == [0, 0]
    assert table.placed.num_entries == 0


async def test_an_old_report_keeps_its_rates_and_loses_its_queue() -> None:
    table, clock = await table_of(record("d0"))
    assert [r.service_id for r in table.silent()] == ["d0"]
    table.on_report(REPORT)
    assert table.silent() == []
    clock.now += 2  # asked before the report is too old to count
    assert [r.service_id for r in table.silent()] == ["d0"]
    assert table.states("decode", MODEL, {})[0].num_requests == 2
    clock.now += 2
    (state,) = table.states("decode", MODEL, {})
    assert (state.num_requests, state.queue_tokens, state.report.num_free_blocks) == (0, 0, 1000)
    assert state.report.prefill_tokens_per_s == 900.0
    assert [r.service_id for r in table.silent()] == ["d0"]


async def test_a_worker_that_did_not_answer_counts_as_mute_until_it_reports_or_lives_anew() -> None:
    table, _clock = await table_of(record("d0"))
    table.on_no_answer("d0", "old")
    assert table.states("decode", MODEL, {})[0].answers
    table.on_no_answer("d0", "a")
    assert not table.states("decode", MODEL, {})[0].answers
    table.on_report(REPORT)
    assert table.states("decode", MODEL, {})[0].answers


async def test_a_report_of_another_life_says_nothing() -> None:
    table, _clock = await table_of(record("d0"))
    table.on_report(dataclasses.replace(REPORT, incarnation="old"))
    (state,) = table.states("decode", MODEL, {})
    assert (state.num_requests, state.report_age_s, state.report.num_free_blocks) == (0, None, 1000)


async def test_only_ready_workers_of_the_service_and_model_take_work_but_all_have_caches() -> None:
    table, _clock = await table_of(
        record("d0"), record("d1", state="draining"), record("d2", models=("other",)), record("p0", "prefill"))
    assert [s.worker_id for s in table.states("decode", MODEL, {})] == ["d0"]
    assert [s.role for s in table.states("prefill", MODEL, {})] == ["prefill"]
    assert sorted(table.caches()) == ["d0", "d1", "d2", "p0"]


def test_the_ledger_is_bounded_and_forgets_with_its_worker() -> None:
    ledger = PlacedLedger(max_entries=10)
    for i in range(30):
        ledger.place(f"d{i % 3}", f"r{i}", 1, now=float(i))
    assert ledger.num_entries == 10
    assert sum(ledger.count(f"d{i}", 30.0)[0] for i in range(3)) == 10
    ledger.forget("d0")
    assert ledger.num_entries == ledger.count("d1", 30.0)[0] + ledger.count("d2", 30.0)[0]
    ledger.place("d1", "r29", 1, now=30.0)  # placed again: one entry
    assert ledger.count("d1", 30.0)[0] <= 4
