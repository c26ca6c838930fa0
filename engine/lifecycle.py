"""What callers do to requests between steps: let them in, tell of KV that landed, end them.

See `engine.request` for the states. A request with several choices is one request here: it enters whole, and `abort`,
`release` and a failure end all its choices.
"""

from __future__ import annotations

from common.errors import InvalidRequest, Overloaded, ShoalError
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.outputs import FinishReason, RequestOutput
from engine.preemption import Preemption
from engine.request import Request, RequestStatus
from engine.roster import Roster
from engine.scheduler import Scheduler

NO_ROOM_RETRY_AFTER_S = 1.0


class Lifecycle:
    """Moves requests between the tables of a roster, on behalf of callers."""

    def __init__(
        self, config: EngineConfig, blocks: BlockManager, roster: Roster, scheduler: Scheduler, preemption: Preemption
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._roster = roster
        self._scheduler = scheduler
        self._preemption = preemption

    def add(self, choices: list[Request]) -> None:
        """Queue the choices of a request that fits the pool and whose id is not in use; the first one is queued."""
        first = choices[0]
        self._enter(choices)
        self._roster.waiting.add(first)
        if not self._end_complete(first):
            self._watch_deadline(first)

    def reserve(self, choices: list[Request]) -> None:
        """As `add`, but grant the blocks of all known tokens now and let others fill them. `Overloaded`: no change."""
        request, roster = choices[0], self._roster
        if len(roster.waiting) + len(roster.ready) + roster.transfers.num_awaiting >= self._config.max_num_waiting:
            raise _no_room(f"{self._config.max_num_waiting} requests wait or await KV, the limit")
        head = roster.waiting.head
        if head is not None and (self._scheduler.is_short or head.num_preemptions):
            raise _no_room(f"{len(roster.waiting)} requests wait for blocks")
        hit = self._blocks.match(request)
        num_blocks = self._blocks.num_blocks(request.num_kv_tokens)
        if not roster.transfers.has_room(num_blocks, hit.block_ids):
            raise _no_room(
                f"{num_blocks} blocks asked for, {roster.transfers.num_awaiting_blocks} of at most "
                f"{roster.transfers.max_awaiting_blocks} await KV")
        if not self._blocks.allocate(request, request.num_kv_tokens, hit):
            raise _no_room(f"{num_blocks} blocks asked for, the pool has fewer to grant")
        request.set_computed(hit.num_tokens)
        request.set_cached(hit.num_tokens)
        self._enter(choices)
        roster.transfers.wait_for_kv(request)

    def land(self, sequence_id: str, num_tokens: int) -> None:
        """The KV of tokens `0 .. num_tokens - 1` is in the blocks. Less than is known already changes nothing."""
        if self._roster.transfers.is_orphan(sequence_id):
            return
        request = self._roster.find(sequence_id, RequestStatus.AWAITING_KV)
        if num_tokens >= request.num_tokens:
            raise InvalidRequest(
                f"num_tokens: KV of at most {request.num_tokens - 1} tokens may land, got {num_tokens}",
                param="num_tokens")
        if num_tokens > request.num_computed_tokens:
            request.set_computed(num_tokens)
            self._blocks.commit(request)

    def start(self, sequence_id: str, num_cached_tokens: int | None) -> None:
        """The transfer has ended: go on from the progress made, before any waiting request."""
        roster = self._roster
        if roster.transfers.is_orphan(sequence_id):
            roster.in_flight.leave(roster.transfers.pop_orphan(sequence_id))
            return
        request = roster.find(sequence_id, RequestStatus.AWAITING_KV)
        if num_cached_tokens is not None:
            request.set_cached(num_cached_tokens)
        num_present = roster.transfers.end_load(request)
        if num_present is not None:
            self._preemption.count_loaded(request, num_present)
        if self._end_complete(request):
            return
        roster.transfers.remove(request)
        if request.num_due_tokens == 0:  # `prefill_only`: in no table now
            roster.transfers.hold(request)
            roster.due_outputs.append(request.output())
            return
        request.status = RequestStatus.READY
        roster.ready[sequence_id] = request
        if not request.prefill_only:
            self._watch_deadline(request)

    def release(self, request_id: str) -> None:
        """End a request in any state, without an output; nothing if it is not live."""
        for request in self._roster.choices(request_id):
            self._roster.dismiss(request)
        self._roster.drop_due(request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request between steps; None if it is not live, or is being filled by others and so only released.

        The last output of its first live choice; the others' are due with the next step.
        """
        choices = self._roster.choices(request_id)
        if not choices or any(self._is_filled_by_others(request) for request in choices):
            return None
        self._roster.drop_due(request_id)
        outputs = [self._roster.end(request, FinishReason.ABORT) for request in choices]
        self._roster.due_outputs += outputs[1:]
        return outputs[0]

    def fail_all(self, error: ShoalError) -> list[RequestOutput]:
        """End every live request with `error`, and hand out what is still due. Nothing is collected any more."""
        roster = self._roster
        outputs, roster.due_outputs = roster.due_outputs, []
        for request in list(roster.live()):
            if request.status is not RequestStatus.FINISHED:
                outputs.append(roster.fail(request, error))
        roster.in_flight.abandon()
        return outputs

    def _end_complete(self, request: Request) -> bool:
        """End all choices of a request whose grammar is complete with the output it brings: nothing is to be drawn."""
        if request.grammar is None or not request.grammar.is_finished:
            return False
        for choice in self._roster.forks.choices(request):
            self._roster.due_outputs.append(self._roster.end(choice, FinishReason.STOP))
        return True

    def _is_filled_by_others(self, request: Request) -> bool:
        return request.status is RequestStatus.AWAITING_KV and not self._roster.transfers.is_loading(request)

    def _enter(self, choices: list[Request]) -> None:
        for request in choices:
            self._roster.enter(request)
        if len(choices) > 1:
            for request in choices[1:]:
                request.status = RequestStatus.FORKING
            self._roster.forks.add(choices[0], choices[1:])

    def _watch_deadline(self, request: Request) -> None:
        self._scheduler.next_deadline = min(self._scheduler.next_deadline, request.deadline)


def _no_room(why: str) -> Overloaded:
    return Overloaded(why, retry_after_s=NO_ROOM_RETRY_AFTER_S)
