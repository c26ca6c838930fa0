"""How late the client itself was: a load generator that lags makes the server look slow, or the load look lighter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from bench.serve.record import Outcome, RequestRecord

_PERIOD_S: Final = 0.01
_Q: Final = 99.0


@dataclass(slots=True)
class LoopDelay:
    """How late a timer of the event loop fires, all the time of the run; chunk times are off by as much."""

    delays_s: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_PERIOD_S)
            self.delays_s.append(max(0.0, loop.time() - before - _PERIOD_S))


@dataclass(frozen=True, slots=True)
class ClientLag:
    """In ms. `sent`: really sent minus due; `loop`: delay of the event loop."""

    sent_p99_ms: float
    sent_max_ms: float
    loop_p99_ms: float
    loop_max_ms: float
    limit_ms: float
    queue_p99_ms: float = 0.0  # wait for a slot; 0 where no rate is asked for, which it would thin out

    @property
    def warning(self) -> str:
        """Empty while all are within the limit at the 99th percentile."""
        late = []
        if self.sent_p99_ms > self.limit_ms:
            late.append(f"requests left up to {self.sent_p99_ms:.1f} ms (p99) after their time")
        if self.loop_p99_ms > self.limit_ms:
            late.append(f"its event loop was {self.loop_p99_ms:.1f} ms (p99) behind, so chunk times are off by as much")
        if self.queue_p99_ms > self.limit_ms:
            late.append(f"requests waited {self.queue_p99_ms:.1f} ms (p99) for --max-concurrency, so the load was "
                        "lighter than the rate")
        return f"the load generator itself was late: {'; '.join(late)} (limit {self.limit_ms:g} ms)" if late else ""


def client_lag(
    records: Sequence[RequestRecord], loop: LoopDelay, limit_ms: float, *, has_rate: bool = False
) -> ClientLag:
    """`has_rate`: the workload has arrivals, so waiting for a slot is a lag too."""
    went = [record for record in records if record.outcome is not Outcome.NOT_SENT]
    sent, queue = [record.sent_s - record.due_s for record in went], [record.queue_s for record in went]
    return ClientLag(_high(sent), _max(sent), _high(loop.delays_s), _max(loop.delays_s), limit_ms,
                     _high(queue) if has_rate else 0.0)


def _high(values_s: Sequence[float]) -> float:
    return float(np.percentile(values_s, _Q)) * 1000 if values_s else 0.0


def _max(values_s: Sequence[float]) -> float:
    return max(values_s, default=0.0) * 1000
