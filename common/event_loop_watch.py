"""How late the event loop is: a loop that is blocked shows here before callers notice."""

from __future__ import annotations

import asyncio
from typing import Final

from common.metrics import counter, histogram

PERIOD_S: Final = 0.1
STALL_S: Final = 0.005
_BUCKETS: Final = (.0005, .001, .002, .005, .01, .02, .05, .1, .25, .5, 1, 5)

DELAY_S = histogram("shoal_event_loop_delay_seconds", "how late a timer of the event loop fires", _BUCKETS)
STALLS = counter("shoal_event_loop_stalls_total", "timers of the event loop that fired more than 5 ms late")


async def watch_event_loop(period_s: float = PERIOD_S) -> None:
    """Sample until cancelled. A stall shorter than the period is seen with probability length / period."""
    loop = asyncio.get_running_loop()
    while True:
        before = loop.time()
        await asyncio.sleep(period_s)
        delay_s = max(0.0, loop.time() - before - period_s)
        DELAY_S.observe(delay_s)
        if delay_s > STALL_S:
            STALLS.inc()
