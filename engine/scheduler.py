"""Which tokens the next step computes, and what follows from the tokens it drew.

    add ─▶ waiting ──admit──▶ running ──finish rule, abort, deadline──▶ gone (blocks freed, last output)
              ▲                  │
              └──front──preempt──┘

No prefill and no decode: a request has pending tokens (`num_tokens - num_computed_tokens`), and each step hands
out one token budget. First every running request with a single pending token gets it, so that no prompt holds up
running answers; then longer remainders get chunks; then waiting requests are admitted; each in order of arrival.

Order. Admission is first come first served and the victim of preemption is always the latest arrival, so every
running request arrived before every waiting one. Both tables are in order of arrival without ever being sorted.

Room. A request is admitted only with blocks for all its known tokens, so only a next token can find the pool
empty. No request grows beyond `max_total_tokens`, which fits the pool, so one that runs alone always finds room:
preemption ends, and the length of an answer does not depend on who else is running. One counter of progress and
chunked prefill within one budget follow vLLM's scheduler and Sarathi-Serve.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from common.errors import DeadlineExceeded, ShoalError
from engine.block_manager import BlockManager
from engine.block_pool import LedgerError
from engine.config import EngineConfig
from engine.outputs import EngineStats, FinishReason, RequestOutput
from engine.request import Request, RequestStatus
from engine.step import PlannedRow, StepPlan, StepResult


class Scheduler:
    """Owns all live requests. A step costs O(running + waiting) and no more."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._blocks = blocks
        self._eos = eos_token_ids
        self._running: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._last_outputs: list[RequestOutput] = []  # of requests ended by `schedule`, handed out by `update`
        self._departed: list[str] = []
        self._counts = EngineStats()
        self._now = 0.0  # of the step being planned
        self.max_total_tokens = min(config.max_model_len, config.num_blocks * config.block_size)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def live(self) -> Iterator[Request]:
        """All live requests in order of arrival."""
        return chain(self._running.values(), self._waiting.values())

    def longest_wait_s(self, now: float) -> float:
        """How long the request at the head of the queue has been in the engine; 0 when none waits."""
        return next((now - request.arrived_at for request in self._waiting.values()), 0.0)

    def add(self, request: Request) -> None:
        """Queue a request of at most `max_total_tokens - 1` prompt tokens whose id is not live."""
        self._waiting[request.request_id] = request

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, between steps; None if it is not live."""
        request = self._running.get(request_id) or self._waiting.get(request_id)
        return None if request is None else self._end(request, FinishReason.ABORT)

    def fail_all(self, error: ShoalError) -> list[RequestOutput]:
        """End every live request with `error`, and hand out what is still due."""
        outputs, self._last_outputs = self._last_outputs, []
        return outputs + [self._end(request, FinishReason.ERROR, error=error) for request in list(self.live())]

    def take_departed(self) -> list[str]:
        """Ids that ended or were preempted since the last call: whatever a runner keeps for them is stale."""
        departed, self._departed = self._departed, []
        return departed

    def schedule(self, now: float) -> StepPlan:
        """The next step's rows, within the token budget; none when nothing is live. `now` in monotonic seconds."""
        self._now = now
        self._end_overdue(now)
        rows: list[PlannedRow] = []
        self._plan_single_tokens(rows)
        budget = self._config.max_num_batched_tokens - len(rows)
        budget = self._plan_chunks(rows, budget)
        self._admit(rows, budget)
        if self._waiting and not self._running:
            raise LedgerError("a waiting request does not fit although nothing is running: blocks have leaked")
        self._counts.num_steps += bool(rows)
        return StepPlan(self._counts.num_steps, rows)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in a retired step: progress, public hashes, drawn tokens, finished requests."""
        if result.step_id != plan.step_id or len(result.token_ids) != len(plan.rows):
            raise ValueError(
                f"result of step {result.step_id} with {len(result.token_ids)} rows, "
                f"expected step {plan.step_id} with {len(plan.rows)}")
        outputs, self._last_outputs = self._last_outputs, []
        for row, token_id in zip(plan.rows, result.token_ids, strict=True):
            if row.samples != (token_id is not None):
                raise ValueError(f"request {row.request_id}: samples is {row.samples}, but token {token_id} was drawn")
            request = self._running[row.request_id]
            request.num_computed_tokens += len(row.token_ids)
            self._blocks.commit(request)
            if token_id is not None:
                outputs.append(self._take_token(request, token_id))
        return outputs

    def stats(self) -> EngineStats:
        """A copy of the counters with the request gauges filled in."""
        return replace(
            self._counts, num_running=len(self._running), num_waiting=len(self._waiting),
            num_finished=dict(self._counts.num_finished))

    def _plan_single_tokens(self, rows: list[PlannedRow]) -> None:
        # Victims come from the end of the table, so they never have a row yet, and all after a victim are gone too.
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING:
                break
            if request.num_pending_tokens == 1 and self._make_room(request):
                rows.append(_row(request, 1))

    def _plan_chunks(self, rows: list[PlannedRow], budget: int) -> int:
        for request in self._running.values():
            if budget == 0:
                break
            if request.num_pending_tokens > 1:
                num_tokens = min(request.num_pending_tokens, budget)
                rows.append(_row(request, num_tokens))
                budget -= num_tokens
        return budget

    def _admit(self, rows: list[PlannedRow], budget: int) -> None:
        while budget > 0 and self._waiting and len(self._running) < self._config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            hit = self._blocks.match(request)
            if not self._blocks.allocate(request, request.num_tokens, hit):
                break
            del self._waiting[request.request_id]
            self._running[request.request_id] = request
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = hit.num_tokens
            self._count_first_admission(request)
            num_tokens = min(request.num_pending_tokens, budget)
            rows.append(_row(request, num_tokens))
            budget -= num_tokens

    def _count_first_admission(self, request: Request) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            request.first_admitted_at = max(self._now, request.arrived_at)
            self._counts.num_prompt_tokens += request.num_prompt_tokens
            self._counts.prefix_queries += request.num_prompt_tokens
            self._counts.prefix_hits += request.num_cached_tokens

    def _make_room(self, request: Request) -> bool:
        """Blocks for the next token, at the cost of the latest arrivals; False if that is the request itself."""
        while not self._blocks.allocate(request, request.num_tokens):
            if self._preempt_latest() is request:
                return False
        return True

    def _preempt_latest(self) -> Request:
        request_id, victim = self._running.popitem()
        self._blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self._waiting[request_id] = victim
        self._waiting.move_to_end(request_id, last=False)
        self._departed.append(request_id)
        self._counts.num_preemptions += 1
        return victim

    def _take_token(self, request: Request, token_id: int) -> RequestOutput:
        request.token_ids.append(token_id)
        self._counts.num_generated_tokens += 1
        reason = self._finish_reason(request, token_id)
        if reason is None:
            return request.output((token_id,))
        return self._end(request, reason, (token_id,), token_id if reason is FinishReason.STOP else None)

    def _finish_reason(self, request: Request, token_id: int) -> FinishReason | None:
        params = request.params
        if (token_id in self._eos and not params.ignore_eos) or token_id in params.stop_token_ids:
            return FinishReason.STOP
        if request.num_output_tokens >= params.max_tokens or request.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _end_overdue(self, now: float) -> None:
        for request in [request for request in self.live() if request.deadline <= now]:
            error = DeadlineExceeded(
                f"the deadline passed {now - request.deadline:.3f} s ago, "
                f"after {request.num_output_tokens} output tokens")
            self._last_outputs.append(self._end(request, FinishReason.ERROR, error=error))

    def _end(
        self, request: Request, reason: FinishReason, new_token_ids: tuple[int, ...] = (),
        stop_token_id: int | None = None, error: ShoalError | None = None,
    ) -> RequestOutput:
        self._blocks.free(request)
        table = self._running if request.status is RequestStatus.RUNNING else self._waiting
        del table[request.request_id]
        request.status = RequestStatus.FINISHED
        self._departed.append(request.request_id)
        self._counts.num_finished[reason] += 1
        return request.output(new_token_ids, reason, stop_token_id, error)


def _row(request: Request, num_tokens: int) -> PlannedRow:
    start = request.num_computed_tokens
    return PlannedRow(
        request.request_id, request.token_ids[start : start + num_tokens], start, request.block_ids,
        start + num_tokens == request.num_tokens, request.num_output_tokens, request.params)
