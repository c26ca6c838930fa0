"""Which tokens the next step computes.

    add ─▶ waiting ──admit──▶ running ──finish rule, abort, deadline──▶ gone (last output; blocks freed once no step
              ▲ ▲                │ ▲ └──prefilled, nothing to draw──▶ held       in flight touches them)
              │ └─front─preempt──┘ └──a place to run── ready ◀──start── awaiting KV ◀── reserve
              └──front──preempt─────────────────────────┘                 ▲
              └──its blocks come back from a lower tier───────────────────┘

No prefill and no decode: a sequence has tokens to plan, and each step hands out one token budget. First every running
sequence with a single token gets it, so that no prompt holds up running answers; then forced runs; then further
choices begin; then waiting ones are admitted; then prompts share the rest (see `prefill_share`). No more run than
leave `min_prefill_fraction` of the budget to prompts. A ready sequence runs before any waiting one is admitted: its KV
is here and holds blocks.

Ahead. A step is planned while the one before it runs, from counts alone: the token that it draws is unknown, and a
sequence that it ends by a stop costs one wasted row. Only where running sequences need more blocks than there are, the
step in flight is taken in first (`schedule` returns None): nothing is preempted that a launched step touches.

Order. Admission follows `WaitingQueue`; who shares a prefix that a running prompt is about to complete waits for it.
When the next one finds no blocks, nobody is admitted in its place.

Room. A sequence is admitted only with blocks for all its known tokens, and while others run with `headroom_fraction`
of the pool to spare, so only a next token can find the pool empty. No sequence grows beyond `max_total_tokens`, which
fits the pool, so one that runs alone with no transfer about always finds room: preemption ends, and the length of an
answer does not depend on who else is there. Beside transfers and pins it may be its own victim; it then waits until
they end. While the head of the queue lacks blocks or has been preempted, nothing is reserved, so that a stream of
transfers cannot starve it.

One counter of progress and chunked prefill within one budget follow vLLM's scheduler and Sarathi-Serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from common.errors import DeadlineExceeded
from engine.block_manager import BlockManager, PrefixHit
from engine.block_pool import LedgerError
from engine.config import EngineConfig
from engine.decode_set import DecodePart
from engine.finish_rule import FinishRule
from engine.grammar.mask_job import MaskJob
from engine.in_flight import ConstrainedRow, PlannedStep
from engine.preemption import Preemption
from engine.prefill_share import Claim, divide
from engine.request import Request, RequestStatus
from engine.roster import Roster
from engine.step import BlockCopy, DecodeRows, Join, PlannedRow, StepPlan


@dataclass(slots=True)
class _Draft:
    """The step being planned. `budget`: tokens that are left."""

    step_id: int
    decode: DecodeRows
    budget: int
    chunks: list[tuple[PlannedRow, Request]] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    constrained: list[ConstrainedRow] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.decode) + len(self.chunks)


class Scheduler:
    """Plans steps over a roster. A step with no change of members costs O(running) in column operations."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, roster: Roster, preemption: Preemption,
        finish_rule: FinishRule, new_job: Callable[[], MaskJob],
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._roster = roster
        self._preemption = preemption
        self._finish_rule = finish_rule
        self._new_job = new_job
        self._num_spare = int(config.headroom_fraction * config.num_blocks)
        self.is_short = False  # the head of the queue found no blocks in the last step
        self.next_deadline = math.inf  # none passes before

    def schedule(self, now: float) -> PlannedStep | None:
        """The next step, within the token budget; one without rows when nothing can run. `now` in monotonic seconds.

        None: the step in flight has to be taken in first.
        """
        roster = self._roster
        roster.tell_time(now)
        if now >= self.next_deadline:
            self._end_overdue(now)
        if not self._grow():
            return None
        step_id = roster.in_flight.newest_id + 1
        decode, part = roster.decoding.plan()
        draft = _Draft(step_id, decode, self._config.max_num_batched_tokens - len(decode))
        draft.constrained += [
            ConstrainedRow(row, part.members.requests[row], int(part.starts[row]) + 1)
            for row in part.members.constrained]
        for request in roster.decoding.drained():
            roster.decoding.remove(request)
            request.last_step_id = step_id
        self._catch_up(draft)
        self._run_ready()
        self._begin_forks(draft)
        self._admit(draft)
        self._run_ready()
        self._share_budget(draft)
        if not draft.num_rows:
            self._check_stall()
        return self._finished(draft, part, now)

    def _grow(self) -> bool:
        """Blocks for the next tokens of all that run. False where that takes blocks that are still in flight."""
        roster = self._roster
        growing = roster.decoding.at_block_end()
        catching_up = [r for r in roster.catching_up.values() if self._blocks.missing_blocks(r) > 0]
        num_needed = len(growing) + sum(map(self._blocks.missing_blocks, catching_up))
        if num_needed <= self._blocks.num_grantable:
            self._blocks.grow(growing)
            for request in growing:
                roster.decoding.update_table(request)
            for request in catching_up:
                self._blocks.allocate(request, request.num_tokens)
            return True
        if len(roster.in_flight):
            return False
        for request in [*growing, *catching_up]:
            if request.status is RequestStatus.RUNNING:  # and no victim of one before it
                self._make_room(request)
        return True

    def _make_room(self, request: Request) -> None:
        """Blocks for its tokens, at the cost of forks, then of the latest of the lowest class: perhaps itself."""
        while not self._blocks.allocate(request, request.num_tokens):
            if self._roster.forks:
                self._queue_forks()
            elif self._preempt() is request:
                return
        if request.seat >= 0:
            self._roster.decoding.update_table(request)

    def _preempt(self) -> Request:
        roster = self._roster
        latest_first = chain(reversed(roster.ready.values()), reversed(roster.running.values()))
        victim = self._preemption.victim(latest_first)
        roster.take_out(victim)
        self._preemption.take_blocks(victim)
        victim.status = RequestStatus.WAITING
        roster.waiting.put_back(victim)
        roster.in_flight.leave(victim)
        return victim

    def _queue_forks(self) -> None:
        """The choices of the latest fork that has blocks go on without them."""
        for request in reversed(self._roster.forks.drop_latest()):
            request.status = RequestStatus.WAITING
            self._roster.waiting.put_back(request)

    def _catch_up(self, draft: _Draft) -> None:
        for request in list(self._roster.catching_up.values()):
            self._plan_chunk(draft, request, min(draft.budget, request.num_unplanned_tokens))

    def _run_ready(self) -> None:
        roster = self._roster
        while roster.ready and self._has_place():
            if next(iter(roster.ready)) in roster.in_flight:
                break  # an ended one of the same id is still known to the runner
            _, request = roster.ready.popitem(last=False)
            self._begin(request)

    def _begin_forks(self, draft: _Draft) -> None:
        """Each further choice computes the last prompt token, and draws, in blocks of its own."""
        roster = self._roster
        for fork in roster.forks.next_waiting():
            while fork.waiting and draft.budget > 0 and self._has_place():
                if fork.waiting[0].sequence_id in roster.in_flight:
                    break  # an ended one of the same id is still known to the runner
                begun = roster.forks.begin(fork)
                if begun is None:
                    break
                request, copies = begun
                draft.copies += copies
                self._begin(request)
                self._plan_chunk(draft, request, 1)
        while roster.forks and not (roster.running or roster.ready or len(roster.in_flight)):
            self._queue_forks()

    def _admit(self, draft: _Draft) -> None:
        """Give blocks to those who wait, as long as they would get tokens in this step."""
        roster = self._roster
        self.is_short = False
        if not roster.waiting:
            return
        claims = [Claim(r.priority, r.num_unplanned_tokens) for r in roster.prefilling.values()]
        hit_lengths: dict[str, int] = {}  # as of the beginning: good enough for an order
        while roster.waiting and draft.budget > 0 and self._has_place():
            chosen = self._choose(claims, draft, hit_lengths)
            if chosen is None:
                break
            request, hit = chosen
            is_load = self._preemption.is_loadable(request, hit) and roster.transfers.may_load(
                self._blocks.num_blocks(request.num_kv_tokens), hit.block_ids)
            num_spare = self._num_spare if roster.running else 0
            if not self._blocks.allocate(request, request.num_kv_tokens, hit, num_spare=num_spare):
                self.is_short = True
                break
            roster.waiting.admit(request)
            request.set_computed(hit.num_tokens)
            if request.first_admitted_at is None:
                request.set_cached(hit.num_tokens)
            if is_load:
                roster.transfers.wait_for_kv(request, is_load=True)
                self._preemption.load(request)
            elif request.num_due_tokens == 0:
                self._count_first_admission(request)
                roster.transfers.hold(request)
                roster.due_outputs.append(request.output())
            else:
                self._begin(request)
                claims.append(Claim(request.priority, request.num_unplanned_tokens))

    def _choose(
        self, claims: Sequence[Claim], draft: _Draft, hit_lengths: dict[str, int]
    ) -> tuple[Request, PrefixHit] | None:
        """The first of the queue's candidates that would get tokens now and whose prefix nobody is computing."""
        roster = self._roster

        def hit_length(request: Request) -> int:
            if request.sequence_id not in hit_lengths:
                hit_lengths[request.sequence_id] = self._blocks.match(request).num_tokens
            return hit_lengths[request.sequence_id]

        num_claimed = sum(claim.num_tokens for claim in claims)
        for request in roster.waiting.candidates(hit_length):
            if request.sequence_id in roster.in_flight:
                continue  # an ended one of the same id is still known to the runner
            hit = self._blocks.match(request)
            if roster.prefixes.is_coming(self._blocks.next_hash(request, hit), draft.step_id):
                continue
            num_tokens = request.num_kv_tokens - hit.num_tokens
            if num_tokens and num_claimed >= draft.budget:
                claim = Claim(request.priority, num_tokens)
                if not divide(draft.budget, [*claims, claim])[-1]:
                    continue
            return request, hit
        return None

    def _share_budget(self, draft: _Draft) -> None:
        prompts = list(self._roster.prefilling.values())
        shares = divide(draft.budget, [Claim(r.priority, r.num_unplanned_tokens) for r in prompts])
        for request, num_tokens in zip(prompts, shares, strict=True):
            self._plan_chunk(draft, request, num_tokens)

    def _plan_chunk(self, draft: _Draft, request: Request, num_tokens: int) -> None:
        """The next tokens of a sequence that is in `prefilling` or `catching_up`."""
        if num_tokens <= 0:
            return
        roster, start = self._roster, request.num_planned_tokens
        end = start + num_tokens
        if not (request.is_joined or request.prefill_only):
            draft.joins.append(request.join())
            request.is_joined = True
        samples = end == request.num_tokens
        if samples and request.grammar is not None:
            draft.constrained.append(ConstrainedRow(draft.num_rows, request, end))
        draft.chunks.append((PlannedRow(
            request.sequence_id, request.token_ids[start:end], start, request.block_ids, samples,
            request.num_output_tokens, request.params,
            request.scores_prompt and start + 1 < request.num_prompt_tokens), request))
        draft.budget -= num_tokens
        request.num_planned_tokens = end
        request.last_step_id = draft.step_id
        if end == request.num_kv_tokens:
            roster.prefilling.pop(request.sequence_id, None)
            roster.catching_up.pop(request.sequence_id, None)
            last_length = self._finish_rule.last_length(request)
            if samples and end + 1 < last_length:
                roster.decoding.add(request, last_length)

    def _finished(self, draft: _Draft, part: DecodePart, now: float) -> PlannedStep:
        job = self._new_job() if draft.constrained else None
        if draft.num_rows:
            self._roster.counts.num_steps = draft.step_id
        plan = StepPlan(
            draft.step_id, [row for row, _ in draft.chunks], draft.decode, draft.joins, draft.copies, job)
        return PlannedStep(plan, part, draft.chunks, job, draft.constrained, now)

    def _check_stall(self) -> None:
        """Nothing can be planned: somebody has to be there who frees blocks one day."""
        roster = self._roster
        is_held = (roster.running or roster.ready or roster.transfers or roster.forks or self._blocks.num_pinned
                   or len(roster.in_flight) or roster.in_flight.num_leaving)
        if roster.waiting and not is_held:
            raise LedgerError("a waiting request does not fit although nothing is running: blocks have leaked")

    def _begin(self, request: Request) -> None:
        self._count_first_admission(request)
        self._preemption.count_recomputed(request)
        self._roster.run(request)
        self._roster.forks.offer(request)

    def _count_first_admission(self, request: Request) -> None:
        counts = self._roster.counts
        if request.first_admitted_at is not None:
            return
        request.first_admitted_at = max(self._roster.now, request.arrived_at)
        if request.is_further_choice:
            request.num_cached_tokens = self._roster.forks.first(request).num_cached_tokens
        else:
            counts.num_prompt_tokens += request.num_prompt_tokens
            counts.prefix_queries += request.num_prompt_tokens
            counts.prefix_hits += request.num_cached_tokens

    def _has_place(self) -> bool:
        return len(self._roster.running) < self._config.max_running

    def _end_overdue(self, now: float) -> None:
        roster = self._roster
        timed = [request for request in roster.live() if self._has_deadline(request)]
        for request in timed:
            if request.deadline <= now and request.status is not RequestStatus.FINISHED:
                roster.due_outputs.append(roster.fail(request, DeadlineExceeded(
                    f"the deadline passed {now - request.deadline:.3f} s ago, "
                    f"after {request.num_output_tokens} output tokens")))
        self.next_deadline = min((r.deadline for r in timed if r.deadline > now), default=math.inf)

    def _has_deadline(self, request: Request) -> bool:
        """Blocks that others may read or write are not taken back by the clock."""
        match request.status:
            case RequestStatus.AWAITING_KV:
                return self._roster.transfers.is_loading(request)
            case RequestStatus.HELD:
                return False
            case RequestStatus.FORKING:  # its end is the end of all choices
                return self._has_deadline(self._roster.forks.first(request))
            case _:
                return not request.prefill_only or request.status is RequestStatus.WAITING
