from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from common.generation import WorkerView
from gateway.placement import load, pick
from tests.fakes import FINGERPRINT, MODEL

IDLE = WorkerView("w", MODEL, FINGERPRINT, 512, 8)
LOADS = st.builds(
    lambda i, f, r, w, seats, free: dataclasses.replace(
        IDLE, worker_id=f"w{i}", num_in_flight=f, num_running=r, num_waiting=w, max_num_seqs=seats,
        num_free_blocks=free),
    st.integers(0, 99), *[st.integers(0, 20)] * 3, st.integers(1, 64), st.integers(0, 99))


def view(worker_id: str, **facts: int) -> WorkerView:
    return dataclasses.replace(IDLE, worker_id=worker_id, **facts)


def chosen(*workers: WorkerView) -> str | None:
    worker = pick(workers)
    return worker and worker.worker_id


def test_the_least_loaded_for_its_capacity_is_taken() -> None:
    assert chosen(view("a", num_in_flight=4), view("b", num_in_flight=6, max_num_seqs=16)) == "b"
    assert chosen(view("a", num_waiting=1), view("b")) == "b"
    assert chosen(view("a", num_running=1), view("b")) == "b"


def test_ties_go_to_more_free_blocks_and_then_to_the_smaller_id() -> None:
    assert chosen(view("a", num_free_blocks=1), view("b", num_free_blocks=2)) == "b"
    assert chosen(view("b"), view("a")) == "a"


def test_excluded_workers_are_not_taken() -> None:
    assert pick([view("a")], exclude={"a"}) is None
    assert pick([]) is None


@given(st.lists(LOADS, min_size=1, max_size=8, unique_by=lambda w: w.worker_id), st.randoms())
def test_the_choice_is_minimal_and_does_not_depend_on_the_order(workers: list[WorkerView], random: object) -> None:
    best = pick(workers)
    assert best is not None
    assert load(best) == min(map(load, workers))
    assert pick(list(reversed(workers))) == best
