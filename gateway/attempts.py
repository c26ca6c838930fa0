"""One generation over as many workers as it takes.

States of an attempt: placed (by the router, or by load when no router answers) → tokens → finished, or → failed: the
worker could not be reached, refused, or was lost. The next attempt goes to another worker and carries all tokens so
far, so the stream goes on without gap or repeat. Before the first token a refusal of all workers, or `max_placements`
of them, is the answer; after it, only the lack of any worker for `worker_wait_s`, or the deadline, ends the stream: it
asks full workers again, ever less often, and one that it lost again, once that is connected anew.

Several choices run as one generation until a worker that has drawn tokens of it is lost. Then each choice that is
open and wanted goes on as a generation of its own, with attempts of its own, all at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

from common import logs, trace
from common.errors import Cancelled, InternalError, Overloaded, ShoalError, Unavailable, WorkerLost
from common.generation import DecodePort, FinishReason, Generation, TokenDelta, WorkerView
from common.placement import Placement, RouteQuery, RouterPort
from gateway import metrics, placement
from gateway.attempt_span import AttemptSpan
from gateway.merging import merged

log = logs.get(__name__)

_REPLACEABLE = (Unavailable, Overloaded, WorkerLost)
_LOOK_AGAIN_S = 0.1
_MAX_REFUSED_WAIT_S = 2.0  # before a begun stream asks full workers again; the first wait is the look's


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """`max_placements` counts workers in a row that brought no token; `worker_wait_s` bounds each wait for one."""

    worker_wait_s: float
    max_placements: int


class Attempts:
    """The deltas of one generation; afterwards, how it went. `router` None: placed by load.

    `on_placed` is called once, when the first worker is about to be given the prompt.
    """

    def __init__(
        self, decode: DecodePort, router: RouterPort | None, limits: AttemptLimits, generation: Generation,
        deadline: float, *, affinity_key: str = "", on_placed: Callable[[], None] | None = None,
    ) -> None:
        self._decode, self._router, self._limits = decode, router, limits
        self._on_placed = on_placed
        self._generation, self._deadline, self._affinity_key = generation, deadline, affinity_key
        choices = range(generation.params.n) if generation.params.n > 1 else (generation.choice,)
        self._tokens: dict[int, list[int]] = {choice: [] for choice in choices}
        self.num_tokens = 0  # of all choices
        self._begun = False  # tokens have come, of this choice or of one that it ran beside
        self._open = set(choices)  # have no finish, and are wanted
        self._failed: dict[_Link, ShoalError] = {}
        self._num_refused_in_row = 0  # times that all workers left were full
        self._num_cached_tokens: int | None = None  # of the first attempt: what the client is told
        self._has_prompt_logprobs = False
        self._span: AttemptSpan | None = None  # of the attempt that runs or ran last
        self._alone: dict[int, Attempts] = {}  # choices that go on each by itself
        self._num_placements_before = 0  # of the choice among others
        self.num_placements = 0  # without those that a full worker refused to a begun stream
        self.last_placement = Placement("")  # of all choices together; choices that go on have their own

    def drop(self, choice: int) -> None:
        """No more of this choice is wanted: its text has ended. Its deltas may still come for a while."""
        self._open.discard(choice)
        if choice in self._alone:
            self._alone[choice].drop(choice)
        elif not self._open and self._span is not None:
            self._span.enough()

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """Until each choice has one with a finish reason or is dropped. Raises what ended the last attempt."""
        num_fruitless = 0
        while not (self._begun and self._generation.params.n > 1):
            self._span = AttemptSpan(self.num_placements, self.num_tokens, after=self._span)
            with self._span.placing():
                worker, placed = await self._place(await self._next_workers())
                self.last_placement = placed
            self.num_placements += 1
            if self.num_placements == 1 and self._on_placed is not None:
                self._on_placed()
            num_tokens_before = self.num_tokens
            try:
                async with (
                    self._span.running(placed),
                    _closing(self._decode.generate(placed.decode_worker_id, self._sent(placed))) as deltas,
                ):
                    async for delta in deltas:
                        _raise_failure(delta)
                        self._span.token()
                        yield self._noted(delta)
                        if not self._open:
                            return
                raise WorkerLost(f"worker {placed.decode_worker_id} ended the stream of tokens without a finish")
            except _REPLACEABLE as error:
                self._failed[_link(worker)] = error
                waits = self._begun and isinstance(error, Overloaded)  # a begun stream waits for room
                if waits:
                    self.num_placements -= 1
                else:
                    self._num_refused_in_row = 0
                if not isinstance(error, Overloaded):
                    self._note_failure(worker, error)
                if self.num_tokens > num_tokens_before:
                    num_fruitless = 0
                elif not waits:
                    num_fruitless += 1
                if num_fruitless >= self._limits.max_placements:
                    raise
        self._alone = {choice: self._of_choice(choice) for choice in sorted(self._open)}
        try:
            streams = [self._while_wanted(choice) for choice in self._alone]
            async with aclosing(merged(streams, len(streams))) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            for attempts in self._alone.values():
                self.num_placements += attempts.num_placements - attempts._num_placements_before

    def alone(self) -> list[tuple[str, Attempts]]:
        """Choices that went on each by itself and were placed, by their own request ids; empty while all run as one."""
        return [(attempts._generation.request_id, attempts) for attempts in self._alone.values()
                if attempts.last_placement.decode_worker_id]

    async def _while_wanted(self, choice: int) -> AsyncGenerator[TokenDelta, None]:
        try:
            async with aclosing(self._alone[choice].deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        except ShoalError:
            if choice in self._open:
                raise

    def _of_choice(self, choice: int) -> Attempts:
        """Goes on with one of several choices; the prompt's logprobs come with the first unless they have come."""
        generation, params = self._generation, self._generation.params
        scored = choice == 0 and not self._has_prompt_logprobs
        attempts = Attempts(self._decode, self._router, self._limits, replace(
            generation, request_id=f"{generation.request_id}.{choice}", choice=choice,
            params=replace(params, n=1, prompt_logprobs=params.prompt_logprobs if scored else None),
        ), self._deadline, affinity_key=self._affinity_key)
        attempts._tokens[choice] = self._tokens[choice]
        attempts.num_tokens, attempts._begun = len(self._tokens[choice]), True
        attempts._failed, attempts._span = dict(self._failed), self._span
        attempts._num_cached_tokens = self._num_cached_tokens
        attempts.num_placements = attempts._num_placements_before = self.num_placements
        return attempts

    async def _next_workers(self) -> list[WorkerView]:
        """Workers on which this request has not failed; waits for one to come (back) or to have room again."""
        loop = asyncio.get_running_loop()
        end = min(self._deadline, loop.time() + self._limits.worker_wait_s)
        refused = {link: e for link, e in self._failed.items() if isinstance(e, Overloaded)}
        ask_again_at = loop.time() + self._refused_wait_s(refused.values())
        while not (workers := self._left()):
            now = loop.time()
            if now >= (self._deadline if refused else end) or (refused and not self._begun):
                raise [*refused.values(), self._last_failure()][0]
            if refused and now >= ask_again_at:
                self._num_refused_in_row += 1
                for link in refused:
                    del self._failed[link]
                refused.clear()
                continue
            await asyncio.sleep(max(0.0, min(_LOOK_AGAIN_S, (ask_again_at if refused else end) - now)))
        return workers

    def _left(self) -> list[WorkerView]:
        """Lives of workers that have not failed; for a begun stream, else those that are connected anew since."""
        workers = self._decode.workers(self._generation.model)
        lives = {(failed.worker_id, failed.incarnation) for failed in self._failed}
        left = [w for w in workers if (w.worker_id, w.incarnation) not in lives]
        if left or not self._begun:
            return left
        return [w for w in workers if _link(w) not in self._failed]

    def _refused_wait_s(self, refusals: Collection[ShoalError]) -> float:
        """How long a begun stream leaves full workers alone: twice as long each time, as long as they ask for."""
        wait_s = max(min((e.retry_after_s or 0.0 for e in refusals), default=0.0),
                     _LOOK_AGAIN_S * 2.0 ** min(self._num_refused_in_row, 10))
        return min(wait_s, _MAX_REFUSED_WAIT_S) * random.uniform(1.0, 1.25)  # not all streams at once

    async def _place(self, workers: list[WorkerView]) -> tuple[WorkerView, Placement]:
        """The router's choice; by load when none makes one in time, or when it names a worker that is not here."""
        by_id = {worker.worker_id: worker for worker in workers}
        if self._router is not None:
            try:
                with trace.span("route", trace.CLIENT) as span:
                    chosen = await self._router.route(self._query(workers))
                    span.put({"shoal.decision_id": chosen.decision_id})
                if (named := by_id.get(chosen.decode_worker_id)) is not None:
                    return named, replace(chosen, decode_incarnation=named.incarnation)
            except ShoalError as error:
                if isinstance(error, Overloaded) and not self._begun:
                    raise
                metrics.ROUTED_BY_LOAD.inc()
        worker = placement.pick(workers)
        assert worker is not None, "there is at least one"
        return worker, Placement(worker.worker_id, worker.incarnation)

    def _query(self, workers: list[WorkerView]) -> RouteQuery:
        generation = self._generation
        present = {worker.worker_id for worker in workers}  # a new life of a worker that failed is not excluded
        return RouteQuery(
            request_id=generation.request_id, model=generation.model, block_hashes=generation.block_hashes,
            num_prompt_tokens=len(generation.prompt_token_ids) + self.num_tokens,
            max_tokens=generation.params.max_tokens - self.num_tokens, cache_salt=generation.cache_salt,
            affinity_key=self._affinity_key, timeout_s=self._timeout_s(), attempt=self.num_placements,
            exclude=tuple(dict.fromkeys(
                failed.worker_id for failed in self._failed if failed.worker_id not in present)))

    def _sent(self, placed: Placement) -> Generation:
        drawn = self._tokens[self._generation.choice]  # nothing yet where several choices run
        return replace(
            self._generation, placement=placed, output_token_ids=tuple(drawn), attempt=self.num_placements - 1,
            timeout_s=self._timeout_s(), trace_context=self._span.carrier() if self._span else {})

    def _timeout_s(self) -> float:
        return max(0.001, self._deadline - asyncio.get_running_loop().time())

    def _noted(self, delta: TokenDelta) -> TokenDelta:
        self._tokens[delta.choice] += delta.token_ids
        self.num_tokens += len(delta.token_ids)
        self._num_refused_in_row = 0
        self._begun = self._begun or self.num_tokens > 0
        self._has_prompt_logprobs = self._has_prompt_logprobs or bool(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self._open.discard(delta.choice)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
        if delta.num_cached_tokens == self._num_cached_tokens:
            return delta
        return replace(delta, num_cached_tokens=self._num_cached_tokens)

    def _note_failure(self, worker: WorkerView, error: ShoalError) -> None:
        (metrics.MIGRATED if self._begun else metrics.REPLACED).inc()
        log.warning("attempt_failed", id=self._generation.request_id, worker_id=worker.worker_id,
                    code=error.code, tokens=self.num_tokens)

    def _last_failure(self) -> ShoalError:
        """The error to hand on: the last one, which knows best when to come back."""
        if self._failed:
            return list(self._failed.values())[-1]
        return Unavailable("the last worker of this model has just gone", retry_after_s=1.0)


class _Link(NamedTuple):
    """One connection to one life of a worker."""

    worker_id: str
    incarnation: str
    connection: int


def _link(worker: WorkerView) -> _Link:
    return _Link(worker.worker_id, worker.incarnation, worker.connection)


def _raise_failure(delta: TokenDelta) -> None:
    if isinstance(delta.error, Cancelled):  # only a client cancels, and that does not come from a worker
        raise WorkerLost(f"the worker gave the request up: {delta.error.message}")
    if delta.finish_reason is FinishReason.ERROR:
        raise delta.error or InternalError("the worker failed without naming the error")
    if delta.finish_reason is FinishReason.ABORT:
        raise WorkerLost("the worker gave the request up")


def _closing(stream: AsyncIterator[TokenDelta]) -> AbstractAsyncContextManager[AsyncGenerator[TokenDelta, None]]:
    return aclosing(cast("AsyncGenerator[TokenDelta, None]", stream))
