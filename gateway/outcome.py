"""How one generation went, measured here, told to the routers when it ends."""

from __future__ import annotations

import asyncio
import time

from common.errors import Cancelled, ShoalError
from common.placement import RequestOutcome, RouterPort
from gateway.attempts import Attempts
from gateway.order import Usage


class OutcomeClock:
    """Starts when the request is received. `tokens` at each delta, `finished` or `failed` once, `tell` at the end."""

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id, self._model = request_id, model
        self._started = self._last = time.perf_counter()
        self._ttft_s = self._max_itl_s = self._queue_s = 0.0
        self._num_gaps = 0
        self._usage: Usage | None = None
        self._finish_reason = self._error_code = ""

    def tokens(self, usage: Usage, queue_s: float) -> None:
        now = time.perf_counter()
        if self._usage is None:
            self._ttft_s, self._queue_s = now - self._started, queue_s
        else:
            self._num_gaps += 1
            self._max_itl_s = max(self._max_itl_s, now - self._last)
        self._last, self._usage = now, usage

    def finished(self, finish_reason: str) -> None:
        self._finish_reason = finish_reason

    def failed(self, error: BaseException) -> None:
        if self._finish_reason:  # the reader closes the generator once it has the ending
            return
        if isinstance(error, ShoalError):
            self._error_code = error.code
        elif isinstance(error, GeneratorExit | asyncio.CancelledError):
            self._error_code = Cancelled.code
        else:
            self._error_code = "internal_error"

    async def tell(self, router: RouterPort | None, attempts: Attempts) -> None:
        if router is None:
            return
        placed, usage, now = attempts.last_placement, self._usage or Usage(0, 0, 0), time.perf_counter()
        mean_itl_s = (self._last - self._started - self._ttft_s) / self._num_gaps if self._num_gaps else 0.0
        await router.publish(RequestOutcome(
            request_id=self._request_id, model=self._model, decision_id=placed.decision_id,
            decode_worker_id=placed.decode_worker_id, prefill_worker_id=placed.prefill_worker_id,
            num_prompt_tokens=usage.num_prompt_tokens, num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens, ttft_s=self._ttft_s, mean_itl_s=mean_itl_s,
            max_itl_s=self._max_itl_s, e2e_s=now - self._started, queue_s=self._queue_s,
            finish_reason=self._finish_reason, error_code=self._error_code, attempts=attempts.num_placements))
