"""A blocked event loop is counted as a stall, an idle one is not."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import REGISTRY

from common.event_loop_watch import watch_event_loop


def stalls() -> float:
    return REGISTRY.get_sample_value("shoal_event_loop_stalls_total") or 0.0


def samples() -> float:
    return REGISTRY.get_sample_value("shoal_event_loop_delay_seconds_count") or 0.0


async def test_a_blocked_loop_is_a_stall() -> None:
    watching = asyncio.create_task(watch_event_loop(0.001))
    await asyncio.sleep(0.01)
    before, seen = stalls(), samples()
    time.sleep(0.05)  # noqa: ASYNC251 (that is the fault)
    await asyncio.sleep(0.01)
    assert stalls() > before
    assert samples() > seen
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
