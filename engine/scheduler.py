"""Which tokens the next step computes, and what follows from the tokens it drew.

    add ─▶ waiting ──admit──▶ running ──finish rule, abort, deadline──▶ gone (blocks freed, last output)
              ▲ ▲                │ ▲ └──prefilled, nothing to draw──▶ held (see transfers) ──release──▶ gone, silently
              │ └─front─preempt──┘ └──a place to run── ready ◀──start── awaiting KV (see transfers) ◀── reserve
              └──front──preempt─────────────────────────┘

No prefill and no decode: a request has pending tokens (`num_tokens - num_computed_tokens`), and each step hands
out one token budget. First every running request with a single pending token gets it, so that no prompt holds up
running answers; then longer remainders get chunks; then waiting requests are admitted; each in order of admission.
A ready request runs before any waiting one is admitted: its KV is here and holds blocks.

Order. Admission is first come first served and the victim of preemption is always the latest admitted, so plain
requests that run arrived before those that wait. `prefill_only` requests are never victims: they do not grow, and
others read their blocks.

Room. A request is admitted only with blocks for all its known tokens, so only a next token can find the pool
empty. No request grows beyond `max_total_tokens`, which fits the pool, so one that runs alone with no transfer about
always finds room: preemption ends, and the length of an answer does not depend on who else is there. Beside transfers
and pins it may be its own victim; it then waits until they end. While the head of the queue lacks blocks or has been
preempted, nothing is reserved, so that a stream of transfers cannot starve it.

One counter of progress and chunked prefill within one budget follow vLLM's scheduler and Sarathi-Serve.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import cast

from common.errors import DeadlineExceeded, InvalidRequest, Overloaded, ShoalError
from engine.block_manager import BlockManager
from engine.block_pool import LedgerError
from engine.config import EngineConfig
from engine.decode_set import DecodeSet
from engine.finish_rule import FinishRule
from engine.outputs import EngineStats, FinishReason, RequestOutput
from engine.request import Request, RequestStatus
from engine.step import PlannedRow, StepPlan, StepResult
from engine.transfers import Transfers

NO_ROOM_RETRY_AFTER_S = 1.0


class Scheduler:
    """Owns all live requests. A step with no change of members costs O(running) in column operations."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._blocks = blocks
        self.max_total_tokens = min(config.max_model_len, config.num_blocks * config.block_size)
        self._finish_rule = FinishRule(eos_token_ids, self.max_total_tokens)
        self._live: dict[str, Request] = {}
        self._running: OrderedDict[str, Request] = OrderedDict()  # = members of `_decoding` and `_prefilling`
        self._decoding = DecodeSet(config.max_num_seqs, config.block_size, eos_token_ids)
        self._prefilling: dict[str, Request] = {}
        self._ready: OrderedDict[str, Request] = OrderedDict()
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._transfers = Transfers(int(config.max_awaiting_fraction * config.num_blocks))
        self._is_short = False  # the head of the queue found no blocks in the last step
        self._due_outputs: list[RequestOutput] = []  # made outside `update`, which hands them out
        self._departed: list[str] = []
        self._counts = EngineStats()
        self._now = 0.0  # of the step being planned
        self._next_deadline = math.inf  # none passes before

    def __contains__(self, request_id: str) -> bool:
        """Whether the id is live, in any state. May be asked from any thread."""
        return request_id in self._live

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._ready or self._due_outputs)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def live(self) -> Collection[Request]:
        """All live requests in order of arrival."""
        return self._live.values()

    def longest_wait_s(self, now: float) -> float:
        """How long the request at the head of the queue has been in the engine; 0 when none waits."""
        return next((now - request.arrived_at for request in self._waiting.values()), 0.0)

    def block_ids(self, request_id: str) -> Sequence[int]:
        """The block table of a live request. Raises `InvalidRequest` for any other."""
        return self._find(request_id).block_ids

    def add(self, request: Request) -> None:
        """Queue a request of at most `max_total_tokens - 1` known tokens whose id is not live."""
        self._live[request.request_id] = self._waiting[request.request_id] = request
        self._next_deadline = min(self._next_deadline, request.deadline)

    def reserve(self, request: Request) -> None:
        """As `add`, but grant the blocks of all known tokens now and let others fill them. `Overloaded`: no change."""
        if len(self._waiting) + len(self._ready) + self._transfers.num_awaiting >= self._config.max_num_waiting:
            raise _no_room(f"{self._config.max_num_waiting} requests wait or await KV, the limit")
        head = next(iter(self._waiting.values()), None)
        if head is not None and (self._is_short or head.num_preemptions):
            raise _no_room(f"{len(self._waiting)} requests wait for blocks")
        hit = self._blocks.match(request)
        num_blocks = self._blocks.num_blocks(request.num_kv_tokens)
        if not self._transfers.has_room(num_blocks, hit.block_ids):
            raise _no_room(
                f"{num_blocks} blocks asked for, {self._transfers.num_awaiting_blocks} of at most "
                f"{self._transfers.max_awaiting_blocks} await KV")
        if not self._blocks.allocate(request, request.num_kv_tokens, hit):
            raise _no_room(f"{num_blocks} blocks asked for, the pool has fewer to grant")
        request.num_computed_tokens = hit.num_tokens
        request.set_cached(hit.num_tokens)
        self._live[request.request_id] = request
        self._transfers.wait_for_kv(request)

    def land(self, request_id: str, num_tokens: int) -> None:
        """The KV of tokens `0 .. num_tokens - 1` is in the blocks. Less than is known already changes nothing."""
        request = self._find(request_id, RequestStatus.AWAITING_KV)
        if num_tokens >= request.num_tokens:
            raise InvalidRequest(
                f"num_tokens: KV of at most {request.num_tokens - 1} tokens may land, got {num_tokens}",
                param="num_tokens")
        if num_tokens > request.num_computed_tokens:
            request.num_computed_tokens = num_tokens
            self._blocks.commit(request)

    def start(self, request_id: str, num_cached_tokens: int | None) -> None:
        """The transfer has ended: go on from the progress made, before any waiting request."""
        request = self._find(request_id, RequestStatus.AWAITING_KV)
        if num_cached_tokens is not None:
            request.set_cached(num_cached_tokens)
        self._transfers.remove(request)
        if request.num_due_tokens == 0:
            self._hold(request)
            return
        request.status = RequestStatus.READY
        self._ready[request_id] = request
        if not request.prefill_only:
            self._next_deadline = min(self._next_deadline, request.deadline)

    def release(self, request_id: str) -> None:
        """End a request in any state, without an output; nothing if it is not live."""
        request = self._live.get(request_id)
        if request is not None:
            self._dismiss(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now, between steps; None if it is not live, or awaits KV and so can only be released."""
        request = self._live.get(request_id)
        if request is None or request.status is RequestStatus.AWAITING_KV:
            return None
        return self._end(request, FinishReason.ABORT)

    def fail_all(self, error: ShoalError) -> list[RequestOutput]:
        """End every live request with `error`, and hand out what is still due."""
        outputs, self._due_outputs = self._due_outputs, []
        return outputs + [self._end(request, FinishReason.ERROR, error=error) for request in list(self.live())]

    def take_departed(self) -> list[str]:
        """Ids that ended or were preempted since the last call: whatever a runner keeps for them is stale."""
        departed, self._departed = self._departed, []
        return departed

    def schedule(self, now: float) -> StepPlan:
        """The next step's rows, within the token budget; none when nothing can run. `now` in monotonic seconds."""
        self._now = now
        if now >= self._next_deadline:
            self._end_overdue(now)
        self._run_ready()
        decode = self._decoding.rows(self._grow_decoding())
        chunks: list[PlannedRow] = []
        budget = self._plan_chunks(chunks, self._config.max_num_batched_tokens - len(decode))
        self._admit(chunks, budget)
        if self._waiting and not (self._running or self._transfers or self._blocks.num_pinned):
            raise LedgerError("a waiting request does not fit although nothing is running: blocks have leaked")
        self._counts.num_steps += bool(decode or chunks)
        return StepPlan(self._counts.num_steps, chunks, decode)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take in a retired step: progress, public hashes, drawn tokens, finished requests."""
        plan.check(result)
        outputs, self._due_outputs = self._due_outputs, []
        num_decoded = len(plan.decode)
        outputs += self._take_decoded(cast("Sequence[int]", result.token_ids[:num_decoded]))
        for row, token_id in zip(plan.chunks, result.token_ids[num_decoded:], strict=True):
            output = self._take_chunk(self._prefilling[row.request_id], len(row.token_ids), token_id)
            if output is not None:
                outputs.append(output)
        return outputs

    def stats(self) -> EngineStats:
        """A copy of the counters with the request gauges filled in. O(requests that do not decode)."""
        unfinished = chain(self._waiting.values(), self._ready.values(), self._prefilling.values())
        return replace(
            self._counts, num_running=len(self._running), num_waiting=len(self._waiting) + len(self._ready),
            num_awaiting=self._transfers.num_awaiting, num_awaiting_blocks=self._transfers.num_awaiting_blocks,
            num_held=self._transfers.num_held, num_waiting_tokens=sum(r.num_due_tokens for r in unfinished),
            num_finished=dict(self._counts.num_finished))

    def _run_ready(self) -> None:
        while self._ready and len(self._running) < self._config.max_num_seqs:
            _, request = self._ready.popitem(last=False)
            self._count_first_admission(request)
            self._run(request)
            self._sort_in(request)

    def _grow_decoding(self) -> list[Request]:
        """Blocks for all pending tokens that need a new one; these requests, of which some may be preempted."""
        growing = self._decoding.at_block_end()
        for request in growing:
            if request.status is RequestStatus.RUNNING:  # and no victim of one before it
                self._make_room(request)
        return growing

    def _plan_chunks(self, chunks: list[PlannedRow], budget: int) -> int:
        for request in self._prefilling.values():
            if budget == 0:
                break
            budget -= _plan_chunk(request, chunks, budget)
        return budget

    def _admit(self, chunks: list[PlannedRow], budget: int) -> None:
        self._is_short = False
        while budget > 0 and self._waiting and len(self._running) < self._config.max_num_seqs:
            request = next(iter(self._waiting.values()))
            hit = self._blocks.match(request)
            if not self._blocks.allocate(request, request.num_kv_tokens, hit):
                self._is_short = True
                break
            del self._waiting[request.request_id]
            request.num_computed_tokens = hit.num_tokens
            if request.first_admitted_at is None:
                request.set_cached(hit.num_tokens)
                self._count_first_admission(request)
            if request.num_due_tokens == 0:
                self._hold(request)
                continue
            self._run(request)
            budget -= _plan_chunk(request, chunks, budget)

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = self._prefilling[request.request_id] = request

    def _sort_in(self, request: Request) -> None:
        """Let a running request decode once a single token is pending."""
        if request.num_pending_tokens == 1 and not request.prefill_only:
            del self._prefilling[request.request_id]
            self._decoding.add(request, self._finish_rule.last_length(request))

    def _hold(self, request: Request) -> None:
        """All KV of a `prefill_only` request is made; it is in no table now."""
        self._transfers.hold(request)
        self._due_outputs.append(request.output())

    def _count_first_admission(self, request: Request) -> None:
        if request.first_admitted_at is None:
            request.first_admitted_at = max(self._now, request.arrived_at)
            self._counts.num_prompt_tokens += request.num_prompt_tokens
            self._counts.prefix_queries += request.num_prompt_tokens
            self._counts.prefix_hits += request.num_cached_tokens

    def _make_room(self, request: Request) -> None:
        """Blocks for the next token, at the cost of the latest admitted, which may be the request itself."""
        while not self._blocks.allocate(request, request.num_tokens):
            if self._preempt_latest() is request:
                break

    def _preempt_latest(self) -> Request:
        latest_first = chain(reversed(self._ready.values()), reversed(self._running.values()))
        victim = next(request for request in latest_first if not request.prefill_only)
        self._take_out(victim)
        self._blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.WAITING
        self._waiting[victim.request_id] = victim
        self._waiting.move_to_end(victim.request_id, last=False)
        self._departed.append(victim.request_id)
        self._counts.num_preemptions += 1
        return victim

    def _take_decoded(self, token_ids: Sequence[int]) -> list[RequestOutput]:
        """One drawn token of each decoding request, by seat."""
        self._counts.num_generated_tokens += len(token_ids)
        outputs = self._decoding.advance(token_ids)
        for request in self._decoding.at_block_end():
            self._blocks.commit(request)
        ended = [(request.seat, request) for request in self._decoding.may_end(token_ids)]
        for seat, request in ended:
            outputs[seat] = self._finish_or_go_on(request, token_ids[seat])
        return outputs

    def _take_chunk(self, request: Request, num_tokens: int, token_id: int | None) -> RequestOutput | None:
        request.num_pending_tokens -= num_tokens
        self._blocks.commit(request)
        if token_id is not None:
            request.append(token_id)
            self._counts.num_generated_tokens += 1
        output = self._output_of(request, token_id)
        if request.status is RequestStatus.RUNNING:
            if request.num_due_tokens == 0:
                self._take_out(request)
                self._transfers.hold(request)
            else:
                self._sort_in(request)
        return output

    def _output_of(self, request: Request, token_id: int | None) -> RequestOutput | None:
        if token_id is not None:
            return self._finish_or_go_on(request, token_id)
        return request.output() if request.prefill_only else None

    def _finish_or_go_on(self, request: Request, token_id: int) -> RequestOutput:
        reason = self._finish_rule.reason(request, token_id)
        if reason is None:
            return request.output((token_id,))
        return self._end(request, reason, (token_id,), token_id if reason is FinishReason.STOP else None)

    def _end_overdue(self, now: float) -> None:
        timed = [request for request in self.live() if _has_deadline(request)]
        overdue = [request for request in timed if request.deadline <= now]
        for request in overdue:
            error = DeadlineExceeded(
                f"the deadline passed {now - request.deadline:.3f} s ago, "
                f"after {request.num_output_tokens} output tokens")
            output = self._end(request, FinishReason.ERROR, error=error)
            self._due_outputs.append(output)
        self._next_deadline = min((r.deadline for r in timed if r.deadline > now), default=math.inf)

    def _end(
        self, request: Request, reason: FinishReason, new_token_ids: tuple[int, ...] = (),
        stop_token_id: int | None = None, error: ShoalError | None = None,
    ) -> RequestOutput:
        output = request.output(new_token_ids, reason, stop_token_id, error)
        self._dismiss(request)
        self._counts.num_finished[reason] += 1
        return output

    def _dismiss(self, request: Request) -> None:
        self._take_out(request)
        self._blocks.free(request)
        del self._live[request.request_id]
        request.status = RequestStatus.FINISHED
        self._departed.append(request.request_id)
        if self._due_outputs:  # nothing comes after the last output, or after a release
            self._due_outputs = [output for output in self._due_outputs if output.request_id != request.request_id]

    def _take_out(self, request: Request) -> None:
        """Of the table of its state; what its next state is, the caller says."""
        match request.status:
            case RequestStatus.WAITING:
                del self._waiting[request.request_id]
            case RequestStatus.READY:
                del self._ready[request.request_id]
            case RequestStatus.RUNNING:
                del self._running[request.request_id]
                if self._prefilling.pop(request.request_id, None) is None:
                    self._decoding.remove(request)
            case _:
                self._transfers.remove(request)

    def _find(self, request_id: str, status: RequestStatus | None = None) -> Request:
        request = self._live.get(request_id)
        if request is None or status not in (None, request.status):
            state = "live" if status is None else status.name
            raise InvalidRequest(f"request_id: {request_id!r} is not {state}", param="request_id")
        return request


def _plan_chunk(request: Request, chunks: list[PlannedRow], budget: int) -> int:
    start, num_tokens = request.num_computed_tokens, min(request.num_due_tokens, budget)
    chunks.append(PlannedRow(
        request.request_id, request.token_ids[start : start + num_tokens], start, request.block_ids,
        start + num_tokens == request.num_tokens, request.num_output_tokens, request.params))
    return num_tokens


def _has_deadline(request: Request) -> bool:
    """Blocks that others may read or write are not taken back by the clock."""
    if request.status in (RequestStatus.AWAITING_KV, RequestStatus.HELD):
        return False
    return not request.prefill_only or request.status is RequestStatus.WAITING


def _no_room(why: str) -> Overloaded:
    return Overloaded(why, retry_after_s=NO_ROOM_RETRY_AFTER_S)
