"""All live sequences, each in the table of its state, and the ways out.

    waiting · forking · ready · running (prefilling, catching up, decoding, or all planned) · awaiting KV · held

A running sequence is in `prefilling` while prompt tokens are left to plan, in `catching_up` while forced tokens are,
in `decoding` while each plan has its next token, and in none of them once its last token is being drawn.

`end` and `fail` make the last output, `dismiss` makes none; all take a sequence out of its tables at once, and leave
its blocks to `InFlight` until no launched step touches them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain

from common.errors import InvalidRequest, ShoalError
from common.generation import TokenLogprobs
from engine.block_manager import BlockManager
from engine.config import EngineConfig
from engine.decode_set import DecodeSet
from engine.forks import Forks
from engine.in_flight import InFlight
from engine.outputs import EngineStats, FinishReason, RequestOutput
from engine.prefixes_in_progress import PrefixesInProgress
from engine.request import Request, RequestStatus
from engine.transfers import Transfers
from engine.waiting_queue import WaitingQueue


class Roster:
    """The tables are open to the scheduler and the intake; only this class ends a sequence."""

    def __init__(self, config: EngineConfig, blocks: BlockManager, eos_token_ids: frozenset[int]) -> None:
        self._blocks = blocks
        self._live: dict[str, Request] = {}  # by sequence id
        self.waiting = WaitingQueue()
        self.ready: OrderedDict[str, Request] = OrderedDict()
        self.running: OrderedDict[str, Request] = OrderedDict()  # in order of admission
        self.prefilling: dict[str, Request] = {}
        self.catching_up: dict[str, Request] = {}
        self.decoding = DecodeSet(config.max_num_seqs, config.block_size, eos_token_ids)
        self.transfers = Transfers(int(config.max_awaiting_fraction * config.num_blocks))
        self.forks = Forks(blocks)
        self.prefixes = PrefixesInProgress(config.block_size)
        self.in_flight = InFlight(blocks)
        self.due_outputs: list[RequestOutput] = []  # in order; handed out at the end of a step, or on closing
        self.counts = EngineStats()
        self.retired_at = 0.0  # when the last step was collected
        self.now = 0.0  # of the last thing that happened, as far as it was told

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self.forks or self.transfers.has_orphan_of(request_id)

    def is_in_use(self, request_id: str) -> bool:
        """Whether the id cannot be given to a new request: some of the old one is still to come, or to be written."""
        return request_id in self or any(output.request_id == request_id for output in self.due_outputs)

    def tell_time(self, now: float) -> None:
        """What happens from here on happens at `now`, monotonic seconds."""
        self.now = max(self.now, now)

    def drop_due(self, request_id: str) -> None:
        """Between steps: nothing of a request that is released or aborted now comes later."""
        if self.due_outputs:
            self.due_outputs = [output for output in self.due_outputs if output.request_id != request_id]

    def live(self) -> Collection[Request]:
        """All live sequences in order of arrival."""
        return self._live.values()

    def owners(self) -> list[Request]:
        """All sequences that have blocks, the ended ones whose last step is in flight among them."""
        return [*self._live.values(), *self.in_flight.owners(), *self.transfers.orphans]

    def other_tables(self) -> list[tuple[int, ...]]:
        """What else holds blocks: forks, and copies in flight."""
        return [*self.forks.tables(), tuple(self.in_flight.source_blocks())]

    def enter(self, request: Request) -> None:
        self._live[request.sequence_id] = request

    def find(self, sequence_id: str, status: RequestStatus | None = None) -> Request:
        """Raises `InvalidRequest` where it is not live, or in another state."""
        request = self._live.get(sequence_id)
        if request is None or status not in (None, request.status):
            state = "live" if status is None else status.name
            raise InvalidRequest(f"request_id: {sequence_id!r} is not {state}", param="request_id")
        return request

    def choices(self, request_id: str) -> list[Request]:
        """The live sequences of a request."""
        request = self._live.get(request_id)
        return self.forks.live(request_id) if request_id in self.forks else [request] if request else []

    def run(self, request: Request) -> None:
        """It has its blocks and a place to run."""
        request.status = RequestStatus.RUNNING
        self.running[request.sequence_id] = self.prefilling[request.sequence_id] = request
        self.prefixes.add(request)

    def catch_up(self, request: Request) -> None:
        """It knows more tokens than one that are not planned."""
        if request.seat >= 0:
            self._leave_decoding(request)
        self.catching_up[request.sequence_id] = request

    def end(
        self, request: Request, reason: FinishReason, new_token_ids: tuple[int, ...] = (),
        stop_token_id: int | None = None, logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = (),
    ) -> RequestOutput:
        """End one sequence with its last output."""
        output = request.output(
            new_token_ids, reason, stop_token_id, None, logprobs, prompt_logprobs, request.timing(self.now))
        self.dismiss(request)
        self.counts.num_finished[reason] += 1
        return output

    def fail(self, request: Request, error: ShoalError) -> RequestOutput:
        """End all choices of a sequence's request with one output, which has the error."""
        output = request.output((), FinishReason.ERROR, None, error, timing=request.timing(self.now))
        for choice in self.forks.choices(request):
            self.dismiss(choice)
        self.counts.num_finished[FinishReason.ERROR] += 1
        return output

    def dismiss(self, request: Request) -> None:
        """End a sequence in any state, without an output."""
        self._blocks.commit(request)
        is_loading = self.transfers.is_loading(request)
        if is_loading:
            self.transfers.orphan(request)
        else:
            self.take_out(request)
        request.status = RequestStatus.FINISHED
        del self._live[request.sequence_id]
        self.forks.end(request)
        if not is_loading:
            self.in_flight.leave(request)

    def take_out(self, request: Request) -> None:
        """Of the table of its state; what its next state is, the caller says."""
        match request.status:
            case RequestStatus.WAITING:
                self.waiting.remove(request)
            case RequestStatus.READY:
                del self.ready[request.sequence_id]
            case RequestStatus.RUNNING:
                del self.running[request.sequence_id]
                self.prefilling.pop(request.sequence_id, None)
                self.catching_up.pop(request.sequence_id, None)
                self.prefixes.remove(request)
                if request.seat >= 0:
                    self._leave_decoding(request)
            case RequestStatus.FORKING:
                pass  # the fork owns it
            case _:
                self.transfers.remove(request)

    def num_unfinished_tokens(self) -> int:
        """To be computed before all can draw. O(sequences that do not decode)."""
        unfinished: Iterator[Request] = chain(self.waiting, self.ready.values(), self.prefilling.values())
        return sum(request.num_due_tokens for request in unfinished)

    def _leave_decoding(self, request: Request) -> None:
        """The newest launched step has a row of each member."""
        self.decoding.remove(request)
        request.last_step_id = max(request.last_step_id, self.in_flight.newest_id)
