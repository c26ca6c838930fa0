"""What follows from the tokens that a step drew: progress, public hashes, outputs, forced tokens, ends.

    a row's result ─▶ ignored (its sequence has ended, or knows the token) · progress · a token: goes on, or ends

A sequence with a grammar takes in the tokens that must follow a drawn one at once: they are put out with it, and their
KV is computed as one chunk. A row that was launched before they were known draws what is known now; only the KV it
made counts. Where logprobs are asked for, each token is drawn, for they come with the draw.

Compressed finite-state machines, the idea behind forced runs, are from SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from common.errors import ShoalError
from common.generation import RequestTiming, TokenLogprobs
from engine.block_manager import BlockManager
from engine.finish_rule import FinishRule
from engine.in_flight import PlannedStep
from engine.outputs import FinishReason, RequestOutput
from engine.request import Request, RequestStatus
from engine.roster import Roster
from engine.step import StepResult


class Intake:
    """Takes in retired steps, in order."""

    def __init__(self, roster: Roster, blocks: BlockManager, finish_rule: FinishRule) -> None:
        self._roster = roster
        self._blocks = blocks
        self._finish_rule = finish_rule

    def take(self, step: PlannedStep, result: StepResult) -> None:
        """The step has retired: everything that it wrote is there. Outputs are due as they are made, row by row."""
        step.plan.check(result)
        num_decoded = len(step.plan.decode)
        if num_decoded:
            self._take_decoded(step, cast("list[int]", list(result.token_ids[:num_decoded])), result)
        for index, (row, request) in enumerate(step.chunks, num_decoded):
            request.num_chunk_rows += 1
            output = self._take_row(
                request, row.start, len(row.token_ids), result.token_ids[index], _logprobs(result, index),
                result.prompt_logprobs.get(index, ()), is_chunk=True)
            if output is not None:
                self._roster.due_outputs.append(output)

    def _take_decoded(self, step: PlannedStep, token_ids: list[int], result: StepResult) -> None:
        """One drawn token of each row."""
        members, starts = step.decode
        taken = self._roster.decoding.take(step.decode, token_ids)
        self._roster.counts.num_generated_tokens += len(token_ids) - len(taken.strays)
        for row in taken.to_commit:
            self._blocks.commit(members.requests[row])
        strays, due = set(taken.strays), self._roster.due_outputs
        special = {*strays, *taken.may_end, *members.constrained, *result.logprobs}
        if not special:
            due += taken.outputs
            return
        for row, plain in enumerate(taken.outputs):
            request, output = members.requests[row], cast("RequestOutput | None", plain)
            if row in strays:
                output = self._take_row(request, int(starts[row]), 1, token_ids[row], _logprobs(result, row))
            elif row in special:
                output = self._conclude(request, token_ids[row], _logprobs(result, row))
            if output is not None:
                due.append(output)

    def _take_row(
        self, request: Request, start: int, num_tokens: int, token_id: int | None,
        logprobs: tuple[TokenLogprobs, ...], prompt_logprobs: Sequence[TokenLogprobs] = (), *, is_chunk: bool = False,
    ) -> RequestOutput | None:
        if request.status is not RequestStatus.RUNNING:
            self._roster.counts.num_wasted_rows += 1
            return None
        request.num_pending_tokens -= num_tokens
        self._blocks.commit(request)
        self._roster.forks.offer(request)
        if request.prompt_scores is not None:
            request.prompt_scores += prompt_logprobs
        if request.prefill_only:
            return self._take_prefilled(request)
        if token_id is None or request.num_tokens != start + num_tokens:
            return None
        request.append(token_id)
        request.num_undrawn_outputs += is_chunk
        self._roster.counts.num_generated_tokens += 1
        return self._conclude(request, token_id, logprobs)

    def _take_prefilled(self, request: Request) -> RequestOutput:
        output = request.output()
        if request.num_due_tokens == 0:
            self._roster.take_out(request)
            self._roster.transfers.hold(request)
        return output

    def _conclude(
        self, request: Request, token_id: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> RequestOutput | None:
        """The output of a sequence that has just taken in a drawn token; None if another choice has ended it since."""
        if request.status is not RequestStatus.RUNNING:
            return None
        new_token_ids = [token_id]
        stop_token_id: int | None = None
        reason = self._finish_rule.reason(request, token_id)
        if reason is FinishReason.STOP:
            stop_token_id = token_id
        elif request.grammar is not None:
            try:
                reason, stop_token_id = self._follow_grammar(request, new_token_ids, reason)
            except ShoalError as error:
                self._take_back(request, len(new_token_ids))
                return self._roster.fail(request, error)
        timing, prompt_logprobs = self._first_token_facts(request)
        if reason is not None:
            return self._roster.end(
                request, reason, tuple(new_token_ids), stop_token_id, logprobs, prompt_logprobs)
        if len(new_token_ids) > 1:
            self._roster.catch_up(request)
        elif request.seat >= 0:
            self._roster.decoding.learn(request)
        return request.output(
            tuple(new_token_ids), logprobs=logprobs, prompt_logprobs=prompt_logprobs, timing=timing)

    def _follow_grammar(
        self, request: Request, new_token_ids: list[int], reason: FinishReason | None
    ) -> tuple[FinishReason | None, int | None]:
        """Accept the drawn token, and take in those that must follow it; why the sequence ends, and the stop token."""
        grammar = request.grammar
        assert grammar is not None
        grammar.accept(new_token_ids)
        if grammar.is_finished:
            return FinishReason.STOP, None
        if reason is not None or request.params.logprobs is not None:
            return reason, None
        forced = grammar.forced()
        for token_id in forced:
            request.append(token_id)
            new_token_ids.append(token_id)
            reason = self._finish_rule.reason(request, token_id)
            if reason is not None:
                break
        num_forced = len(new_token_ids) - 1
        request.num_undrawn_outputs += num_forced
        self._roster.counts.num_generated_tokens += num_forced
        if reason is FinishReason.STOP:
            return reason, new_token_ids[-1]
        grammar.accept(new_token_ids[1:])
        return (FinishReason.STOP if grammar.is_finished else reason), None

    def _take_back(self, request: Request, num_tokens: int) -> None:
        """The newest tokens are not put out, though the row that drew the first of them was computed."""
        del request.token_ids[-num_tokens:]
        request.num_pending_tokens -= num_tokens
        request.num_undrawn_outputs -= num_tokens
        self._roster.counts.num_generated_tokens -= num_tokens

    def _first_token_facts(
        self, request: Request
    ) -> tuple[RequestTiming | None, tuple[TokenLogprobs | None, ...]]:
        """What comes with a sequence's first token alone: its timing, and the prompt's logprobs where asked for."""
        if request.first_drawn_at is not None:
            return None, ()
        request.first_drawn_at = self._roster.now
        request.num_chunks = request.num_chunk_rows
        scores, request.prompt_scores = request.prompt_scores, None
        return request.timing(self._roster.now), () if scores is None else (None, *scores)


def _logprobs(result: StepResult, row: int) -> tuple[TokenLogprobs, ...]:
    found = result.logprobs.get(row)
    return () if found is None else (found,)
