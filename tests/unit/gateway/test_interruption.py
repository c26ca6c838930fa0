from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import Cancelled, DeadlineExceeded, Unavailable
from gateway.interruption import Interruptible, deadline, interrupted_on_disconnect


async def test_an_interrupted_block_cleans_up_once_and_leaves_with_the_first_reason() -> None:
    work, cleaned = Interruptible(), 0

    async def body() -> None:
        nonlocal cleaned
        async with work:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned += 1

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    work.interrupt(Unavailable("first"))
    work.interrupt(Cancelled("second"))
    with pytest.raises(Unavailable, match="first"):
        await task
    assert cleaned == 1


async def test_after_an_interruption_the_task_can_wait_again() -> None:
    work = Interruptible()

    async def body() -> str:
        try:
            async with work:
                await asyncio.Event().wait()
        except Unavailable:
            await asyncio.sleep(0.01)
            return "told the client"
        return "no"

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    work.interrupt(Unavailable("x"))
    assert await task == "told the client"


async def test_an_interruption_before_the_block_keeps_it_from_running_and_one_after_it_does_nothing() -> None:
    early = Interruptible()
    early.interrupt(Unavailable("x"))
    with pytest.raises(Unavailable):
        async with early:
            raise AssertionError("must not run")
    late = Interruptible()
    async with late:
        pass
    late.interrupt(Unavailable("x"))
    await asyncio.sleep(0)


async def test_a_cancellation_from_elsewhere_stays_a_cancellation() -> None:
    work = Interruptible()

    async def body() -> None:
        async with work:
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    await asyncio.sleep(0)
    task.cancel()
    work.interrupt(Unavailable("x"))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_disconnect_interrupts_and_other_messages_do_not() -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue()
    work = Interruptible()

    async def body() -> None:
        async with work, interrupted_on_disconnect(work, messages.get):
            await asyncio.Event().wait()

    task = asyncio.create_task(body())
    messages.put_nowait({"type": "http.request"})
    await asyncio.sleep(0.01)
    assert not task.done()
    messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(Cancelled):
        await task


async def test_a_passed_deadline_names_what_was_allowed_and_other_timeouts_pass_through() -> None:
    now = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded, match=r"0\.5 s"):
        async with deadline(now, 0.5):
            await asyncio.sleep(5)
    with pytest.raises(TimeoutError):
        async with deadline(now + 60, 60):
            raise TimeoutError
