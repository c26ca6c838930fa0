"""How one generation went, measured here, told to the routers when it ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from common.errors import Cancelled, ShoalError
from common.generation import TokenDelta
from common.placement import RequestOutcome, RouterPort
from gateway.attempts import Attempts
from gateway.order import Usage


class OutcomeClock:
    """Starts when the request is received. `tokens` at each delta, `finished` at each choice's end, then `tell`."""

    def __init__(self, request_id: str, model: str, num_choices: int) -> None:
        self._request_id, self._model, self._num_open = request_id, model, num_choices
        self._started = self._last = time.perf_counter()
        self.ttft_s = self.queue_s = self._max_itl_s = 0.0
        self._num_gaps = 0
        self._paced: int | None = None  # the choice whose gaps are measured: the first that brought tokens
        self._usage = Usage(0, 0, 0)
        self._finish_reason = self._error_code = ""

    def tokens(self, delta: TokenDelta, num_prompt_tokens: int, num_new_tokens: int) -> Usage:
        """A delta came, so many tokens of which count. Returns the counts of all choices so far."""
        now = time.perf_counter()
        if self._paced is None:
            self._paced, self._last = delta.choice, now
            self.ttft_s, self.queue_s = now - self._started, delta.queue_s
        elif delta.choice == self._paced:
            self._num_gaps += 1
            self._max_itl_s = max(self._max_itl_s, now - self._last)
            self._last = now
        self._usage = Usage(
            num_prompt_tokens, delta.num_cached_tokens, self._usage.num_output_tokens + num_new_tokens)
        return self._usage

    def finished(self, finish_reason: str) -> None:
        """One choice has ended well; of the last one the reason is told."""
        self._num_open -= 1
        if not self._num_open:
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
        placed, usage, now = attempts.last_placement, self._usage, time.perf_counter()
        mean_itl_s = (self._last - self._started - self.ttft_s) / self._num_gaps if self._num_gaps else 0.0
        outcome = RequestOutcome(
            request_id=self._request_id, model=self._model, decision_id=placed.decision_id,
            decode_worker_id=placed.decode_worker_id, prefill_worker_id=placed.prefill_worker_id,
            num_prompt_tokens=usage.num_prompt_tokens, num_cached_tokens=usage.num_cached_tokens,
            num_output_tokens=usage.num_output_tokens, ttft_s=self.ttft_s, mean_itl_s=mean_itl_s,
            max_itl_s=self._max_itl_s, e2e_s=now - self._started, queue_s=self.queue_s,
            finish_reason=self._finish_reason, error_code=self._error_code, attempts=attempts.num_placements)
        await router.publish(outcome)
        for request_id, own in attempts.alone():
            await router.publish(_of_resumed(outcome, request_id, own))


def _of_resumed(outcome: RequestOutcome, request_id: str, attempts: Attempts) -> RequestOutcome:
    """Of a choice that was routed by itself: it ends that placement, and has no first token of its own to time."""
    placed = attempts.last_placement
    return replace(
        outcome, request_id=request_id, decision_id=placed.decision_id, decode_worker_id=placed.decode_worker_id,
        prefill_worker_id=placed.prefill_worker_id, num_output_tokens=attempts.num_tokens, ttft_s=0.0,
        attempts=attempts.num_placements)
