"""One generation over as many workers as it takes.

States of an attempt: placed (by the router, or by load when no router answers) → tokens → finished, or → failed: the
worker could not be reached, refused, or was lost. The next attempt goes to another worker and carries all tokens so
far, so the stream goes on without gap or repeat. It ends in an error only when the attempts are used up, when no
worker is there within `worker_wait_s`, or at the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import cast

from common import logs
from common.errors import InternalError, Overloaded, ShoalError, Unavailable, WorkerLost
from common.generation import DecodePort, FinishReason, Generation, TokenDelta, WorkerView
from common.placement import Placement, RouteQuery, RouterPort
from gateway import metrics, placement

log = logs.get(__name__)

_REPLACEABLE = (Unavailable, Overloaded, WorkerLost)
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """`max_placements` counts all workers that one request may be sent to; `worker_wait_s` each wait for one."""

    worker_wait_s: float
    max_placements: int


class Attempts:
    """The deltas of one generation; afterwards, how it went. `router` None: placed by load."""

    def __init__(
        self, decode: DecodePort, router: RouterPort | None, limits: AttemptLimits, generation: Generation,
        deadline: float,
    ) -> None:
        self._decode, self._router, self._limits = decode, router, limits
        self._generation, self._deadline = generation, deadline
        self._tokens: list[int] = []
        self._failed: dict[tuple[str, str], ShoalError] = {}  # (worker, its incarnation) → why
        self._num_cached_tokens: int | None = None  # of the first attempt: what the client is told
        self.num_placements = 0
        self.last_placement = Placement("")

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """Up to and with the one that has a finish reason. Raises the `ShoalError` that ended the last attempt."""
        while True:
            worker = await self._next_worker()
            self.last_placement = placed = await self._place(worker)
            self.num_placements += 1
            try:
                async with _closing(self._decode.generate(placed.decode_worker_id, self._sent(placed))) as deltas:
                    async for delta in deltas:
                        _raise_failure(delta)
                        yield self._noted(delta)
                        if delta.finish_reason is not None:
                            return
                raise WorkerLost(f"worker {placed.decode_worker_id} ended the stream of tokens without a finish")
            except _REPLACEABLE as error:
                self._note_failure(placed, error)
                if self.num_placements >= self._limits.max_placements:
                    raise

    async def _next_worker(self) -> list[WorkerView]:
        """Workers on which this request has not failed; waits for one to come (back)."""
        loop = asyncio.get_running_loop()
        end = min(self._deadline, loop.time() + self._limits.worker_wait_s)
        while True:
            workers = [w for w in self._decode.workers(self._generation.model)
                       if (w.worker_id, w.incarnation) not in self._failed]
            if workers:
                return workers
            refusals = [e for e in self._failed.values() if isinstance(e, Overloaded)]
            if refusals or loop.time() >= end:
                raise refusals[-1] if refusals else self._last_failure()
            await asyncio.sleep(min(_LOOK_AGAIN_S, max(0.0, end - loop.time())))

    async def _place(self, workers: list[WorkerView]) -> Placement:
        """The router's choice; by load when none answers in time, or when it names a worker that is not here."""
        by_id = {worker.worker_id: worker for worker in workers}
        if self._router is not None:
            try:
                chosen = await self._router.route(self._query())
                if chosen.decode_worker_id in by_id:
                    return replace(chosen, decode_incarnation=by_id[chosen.decode_worker_id].incarnation)
            except Unavailable:
                metrics.ROUTED_BY_LOAD.inc()
            except Overloaded:
                if not self._tokens:
                    raise
        worker = placement.pick(workers)
        assert worker is not None, "there is at least one"
        return Placement(worker.worker_id, worker.incarnation)

    def _query(self) -> RouteQuery:
        generation = self._generation
        return RouteQuery(
            request_id=generation.request_id, model=generation.model, block_hashes=generation.block_hashes,
            num_prompt_tokens=len(generation.prompt_token_ids) + len(self._tokens),
            max_tokens=generation.params.max_tokens - len(self._tokens), cache_salt=generation.cache_salt,
            timeout_s=self._timeout_s(), exclude=tuple(worker_id for worker_id, _ in self._failed),
            attempt=self.num_placements)

    def _sent(self, placed: Placement) -> Generation:
        return replace(
            self._generation, placement=placed, output_token_ids=tuple(self._tokens), attempt=self.num_placements - 1,
            timeout_s=self._timeout_s())

    def _timeout_s(self) -> float:
        return max(0.001, self._deadline - asyncio.get_running_loop().time())

    def _noted(self, delta: TokenDelta) -> TokenDelta:
        self._tokens += delta.token_ids
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
        return replace(delta, num_cached_tokens=self._num_cached_tokens)

    def _note_failure(self, placed: Placement, error: ShoalError) -> None:
        self._failed[placed.decode_worker_id, placed.decode_incarnation] = error
        (metrics.MIGRATED if self._tokens else metrics.REPLACED).inc()
        log.warning("attempt_failed", id=self._generation.request_id, worker_id=placed.decode_worker_id,
                    code=error.code, tokens=len(self._tokens))

    def _last_failure(self) -> ShoalError:
        """The error to hand on: the last one, which knows best when to come back."""
        if self._failed:
            return list(self._failed.values())[-1]
        return Unavailable("the last worker of this model has just gone", retry_after_s=1.0)


def _raise_failure(delta: TokenDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise delta.error or InternalError("the worker failed without naming the error")
    if delta.finish_reason is FinishReason.ABORT:
        raise WorkerLost("the worker gave the request up")


def _closing(stream: AsyncIterator[TokenDelta]) -> AbstractAsyncContextManager[AsyncGenerator[TokenDelta, None]]:
    return aclosing(cast("AsyncGenerator[TokenDelta, None]", stream))
