from __future__ import annotations

import asyncio

import pytest

from common.errors import Overloaded, Unavailable, WorkerLost
from gateway.admission import Admission


def test_more_than_the_limit_is_refused_with_a_time_to_come_back_and_a_freed_slot_is_taken_again() -> None:
    admission = Admission(1, retry_after_s=2.5)
    with admission.slot():
        assert admission.num_running == 1
        with pytest.raises(Overloaded) as refused, admission.slot():
            pass
        assert refused.value.retry_after_s == 2.5
    with admission.slot():
        pass
    assert admission.num_running == 0


def test_a_failed_request_gives_its_slot_back() -> None:
    admission = Admission(1, 1)
    with pytest.raises(ValueError, match="x"), admission.slot():
        raise ValueError("x")
    assert admission.num_running == 0


async def test_a_drain_refuses_new_work_and_is_idle_when_the_last_has_ended() -> None:
    admission = Admission(2, 1)
    with admission.slot():
        admission.start_drain()
        idle = asyncio.create_task(admission.idle())
        with pytest.raises(Unavailable), admission.slot():
            pass
        await asyncio.sleep(0)
        assert not idle.done()
    await asyncio.wait_for(idle, 1)


async def test_a_cut_ends_each_running_request_with_the_given_error() -> None:
    admission = Admission(8, 1)

    async def request() -> None:
        with admission.slot() as work:
            async with work:
                await asyncio.Event().wait()

    tasks = [asyncio.create_task(request()) for _ in range(3)]
    await asyncio.sleep(0)
    admission.cut(WorkerLost("cut"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(r) for r in results] == [WorkerLost] * 3
    assert admission.num_running == 0


async def test_a_request_holds_a_slot_for_each_choice_and_at_most_all_there_are() -> None:
    admission = Admission(8, retry_after_s=2.5)
    with admission.slot() as work:
        admission.widen(work, 6)
        with admission.slot() as other:
            admission.widen(other, 2)
            with pytest.raises(Overloaded), admission.slot():
                pass
        with admission.slot() as other:
            with pytest.raises(Overloaded) as refused:
                admission.widen(other, 3)
            assert refused.value.retry_after_s == 2.5
        assert admission.num_running == 1
    with admission.slot() as work:
        admission.widen(work, 64)
        with pytest.raises(Overloaded), admission.slot():
            pass
    with admission.slot():
        assert admission.num_running == 1
