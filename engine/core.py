"""One engine: requests go in, tokens come out, step by step. Not thread-safe; `EngineLoop` gives it a thread.

    OPEN ──step (schedule, launch; collect, take in), add, abort──▶ OPEN
    OPEN ──close, or a step that fails──▶ CLOSED: every live request was answered, `add` and `reserve` are refused

With overlap a call of `step` plans and launches one step and takes in the one before it, which ran meanwhile; without,
it takes in the one that it launched. The tokens are the same.

A request whose KV comes from elsewhere: `reserve` (all its blocks, or a refusal), then `land` as often as KV has been
written through `block_view`, then `start`; or `release` at any point. Whoever copies sees to it that no copy touches
a block that it gives back: nothing else takes one back.

The same object runs with a torch runner or with the mock, under a worker or under the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from common.block_hash import BlockHash, HashScheme
from common.errors import (
    ConfigError,
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    ShoalError,
    Unavailable,
)
from common.kv_event import KvEvent
from engine.block_manager import BlockManager
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.finish_rule import FinishRule
from engine.grammar.mask_job import MaskJob, MaskJobs
from engine.grammar.state import GrammarState
from engine.intake import Intake
from engine.lifecycle import Lifecycle
from engine.outputs import EngineStats, RequestOutput
from engine.preemption import Preemption
from engine.request import EngineRequest, Request, sequence_id
from engine.roster import Roster
from engine.scheduler import Scheduler
from engine.step import Runner
from engine.step_meter import StepMeter
from engine.swap_port import SwapPort

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0
_NUM_MASK_THREADS = 1


@dataclass(frozen=True, slots=True)
class Reservation:
    """The whole block table of a request; its first `num_cached_tokens` have their KV and their hashes already."""

    request_id: str
    num_cached_tokens: int
    block_ids: tuple[int, ...]


class EngineFailed(RuntimeError):
    """A step failed and the engine is closed. `outputs` answer all requests that were live; the cause is chained."""

    def __init__(self, cause: Exception, outputs: list[RequestOutput]) -> None:
        super().__init__(f"engine step failed: {cause}")
        self.cause = cause
        self.outputs = outputs


class EngineCore:
    """Joins scheduler, blocks and runner. `max_kv_events` > 0 records KV events for `take_kv_events`."""

    def __init__(
        self, config: EngineConfig, runner: Runner, scheme: HashScheme, *,
        max_kv_events: int = 0, clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if scheme.block_size != config.block_size:
            raise ConfigError(
                f"block_size is {config.block_size}, but the hash scheme's is {scheme.block_size}", param="block_size")
        self.config = config
        self.max_total_tokens = min(config.max_model_len, config.num_blocks * config.block_size)
        self._runner = runner
        self._scheme = scheme
        self._clock = clock
        self._meter = StepMeter()
        self._mask_jobs: MaskJobs | None = None  # made for the first request with a grammar
        self._pool = BlockPool(config.num_blocks, max_kv_events)
        self._blocks = BlockManager(self._pool, scheme, config.enable_prefix_caching)
        self._roster = Roster(config, self._blocks, runner.eos_token_ids)
        finish_rule = FinishRule(runner.eos_token_ids, self.max_total_tokens)
        self._preemption = Preemption(
            self._blocks, config.block_size, self._roster.counts, lambda: self._meter.prefill_tokens_per_s)
        self._scheduler = Scheduler(config, self._blocks, self._roster, self._preemption, finish_rule, self._new_job)
        self._intake = Intake(self._roster, self._blocks, finish_rule)
        self._lifecycle = Lifecycle(config, self._blocks, self._roster, self._scheduler, self._preemption)
        self._closed_by: ShoalError | None = None
        self._num_leaked_blocks = 0
        self._is_stalled = False

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id is live, or ended while it was loaded and the load goes on.

        May be asked from any thread.
        """
        return request_id in self._roster

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do, if only to take in what is in flight."""
        roster = self._roster
        return bool(roster.running or roster.waiting or roster.ready or roster.forks or roster.due_outputs
                    or len(roster.in_flight) or roster.transfers.num_loading)

    @property
    def is_stalled(self) -> bool:
        """The last step found nothing to do beside requests that wait or load: only a call or a deadline changes that.
        """
        return self._is_stalled

    @property
    def block_bytes(self) -> int:
        return self._runner.block_bytes

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of a block in place, `block_bytes` long and writable. May be taken in any thread."""
        return self._runner.block_view(block_id)

    def use_swap(self, port: SwapPort) -> None:
        """From now on preempted sequences may have their KV saved through `port`; see `engine.preemption`."""
        self._preemption.port = port

    def add(self, asked: EngineRequest, grammar: GrammarState | None = None) -> None:
        """Queue a request. The prompt is hashed here, once. `grammar`: at its start; the engine's own from here on.

        Raises `InvalidRequest` (id in use, empty prompt, token outside the vocabulary, nothing left to draw),
        `ContextLengthExceeded`, `FingerprintMismatch`, `Overloaded`, or `Unavailable` once closed.
        """
        now = self._tell_time()
        self._check(asked)
        waiting = self._roster.waiting
        if len(waiting) >= self.config.max_num_waiting:
            longest_s = max(now - request.arrived_at for request in waiting)
            raise Overloaded(
                f"{len(waiting)} requests are waiting, the limit is {self.config.max_num_waiting}",
                retry_after_s=min(max(longest_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))
        self._lifecycle.add(self._choices(asked, grammar, now))

    def reserve(self, asked: EngineRequest, grammar: GrammarState | None = None) -> Reservation:
        """Grant the blocks of all known tokens, cached ones shared, to a request whose KV comes from elsewhere.

        Until `start` it is neither scheduled nor preempted, and nothing but `release` or `close` ends it. Raises as
        `add` does; `Overloaded` when the pool has no room now, or when `max_awaiting_fraction` of it awaits KV.
        """
        self._check(asked)
        if asked.params.prompt_logprobs is not None and not asked.output_token_ids and not asked.prefill_only:
            raise InvalidRequest(
                "prompt_logprobs: every prompt token of such a request is computed where it decodes, none may come "
                "from elsewhere", param="prompt_logprobs")
        choices = self._choices(asked, grammar, self._tell_time())
        self._lifecycle.reserve(choices)
        return Reservation(asked.request_id, choices[0].num_computed_tokens, choices[0].block_ids)

    def land(self, request_id: str, num_tokens: int) -> None:
        """The KV of tokens `0 .. num_tokens - 1` is in the reserved blocks; full blocks become public.

        A lower count than an earlier one changes nothing. Raises `InvalidRequest` for a request that does not await
        KV, and for its last token, which always runs here.
        """
        self._lifecycle.land(request_id, num_tokens)

    def start(self, request_id: str, num_cached_tokens: int | None = None) -> None:
        """Schedule a reserved request from its progress on, before those that wait without blocks.

        `num_cached_tokens`, when given, is how many prompt tokens nobody had to compute; else those of the
        reservation. Raises `InvalidRequest` for a request that does not await KV.
        """
        self._tell_time()
        self._lifecycle.start(request_id, num_cached_tokens)
        self._forget_departed()

    def release(self, request_id: str) -> None:
        """End a request in whatever state, and put nothing out. Idempotent.

        Its blocks are free at once, or when the step in flight that touches them has retired.
        """
        self._lifecycle.release(request_id)
        self._forget_departed()

    def block_ids(self, request_id: str) -> Sequence[int]:
        """The block table of a live request as it is now. Raises `InvalidRequest` for any other."""
        return self._roster.find(request_id).block_ids

    def peek(self, prompt_token_ids: Sequence[int], adapter: str = "", salt: str = "") -> int:
        """How many tokens of such a prompt are cached now. Changes nothing."""
        return self._blocks.peek(prompt_token_ids, adapter, salt)

    def pin(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, int]:
        """Keep what is cached of these hashes where it is until `unpin`, once per call: hash → block id."""
        return self._blocks.pin(hashes)

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Raises `LedgerError` for a block that is not pinned."""
        self._blocks.unpin(block_ids)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request, with all its choices; its blocks as in `release`. The last output.

        None if it is not live, or awaits KV: then it goes on until `release`. Of several choices, the last outputs of
        all but the first that lived come with the next step; until then the id is in use.
        """
        self._tell_time()
        output = self._lifecycle.abort(request_id)
        self._forget_departed()
        return output

    def step(self) -> list[RequestOutput]:
        """One step. Raises `EngineFailed`, which carries the last outputs, if anything in it raises."""
        try:
            return self._step()
        except Exception as exc:
            raise EngineFailed(exc, self.close(InternalError(f"the engine failed: {exc}"))) from exc

    def _step(self) -> list[RequestOutput]:
        in_flight = self._roster.in_flight
        step = self._scheduler.schedule(self._clock())
        if step is None:
            self._retire()
            step = self._scheduler.schedule(self._clock())
            assert step is not None, "with nothing in flight, room can be made"
        self._forget_departed()
        has_rows = step.plan.num_rows > 0
        if has_rows:
            self._runner.launch(step.plan)
            in_flight.launch(step)
            in_flight.provide_masks()
        while len(in_flight) > (self.config.enable_overlap and has_rows):
            self._retire()
        outputs, self._roster.due_outputs = self._roster.due_outputs, []
        self._is_stalled = not (has_rows or outputs or len(in_flight))
        return outputs

    def _retire(self) -> None:
        """Take in the oldest step in flight."""
        in_flight = self._roster.in_flight
        step = in_flight.oldest()
        result = self._runner.collect()
        now = self._clock()
        self._meter.add(now - max(step.planned_at, self._roster.retired_at), step.plan)
        self._roster.now = self._roster.retired_at = now
        self._intake.take(step, result)
        in_flight.retire()
        in_flight.provide_masks()
        self._forget_departed()

    def close(self, error: ShoalError) -> list[RequestOutput]:
        """End every live request with `error` and refuse new ones; a step in flight is not waited for. Idempotent."""
        self._closed_by = self._closed_by or error
        outputs = self._lifecycle.fail_all(error)
        if self._mask_jobs is not None:
            self._mask_jobs.close()
        return outputs

    def stats(self) -> EngineStats:
        """A copy of the counters with the gauges filled in. O(sequences that do not decode)."""
        roster, counts = self._roster, self._roster.counts
        return replace(
            counts, num_running=len(roster.running),
            num_waiting=len(roster.waiting) + len(roster.ready) + roster.forks.num_waiting,
            num_awaiting=roster.transfers.num_awaiting, num_awaiting_blocks=roster.transfers.num_awaiting_blocks,
            num_held=roster.transfers.num_held, num_waiting_tokens=roster.num_unfinished_tokens(),
            num_finished=dict(counts.num_finished), num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_grantable, num_leaked_blocks=self._num_leaked_blocks,
            num_pinned_blocks=self._pool.num_pinned, step_s=self._meter.step_s,
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s)

    def take_kv_events(self) -> list[KvEvent]:
        """The events of retired steps since the last call, in order."""
        return self._pool.take_events()

    def reset_prefix_cache(self) -> int:
        """Forget all cached content that no live request uses; how many blocks that were."""
        return self._pool.clear()

    def check_integrity(self) -> None:
        """Count leaked blocks (see `stats`), then raise `LedgerError` unless every block has exactly one owner."""
        owners, tables = self._roster.owners(), self._roster.other_tables()
        self._num_leaked_blocks = self._blocks.count_leaked(owners, tables)
        self._blocks.check(owners, tables)

    def _choices(self, asked: EngineRequest, grammar: GrammarState | None, now: float) -> list[Request]:
        """The sequences of a request: the first computes the prompt for all."""
        if grammar is not None and asked.output_token_ids:
            grammar.accept(asked.output_token_ids)
        first = Request(asked, self._scheme, now, grammar=grammar)
        return [first, *(
            Request(asked, self._scheme, now, first=first, choice=choice, grammar=grammar and grammar.fork())
            for choice in range(1, asked.num_choices))]

    def _tell_time(self) -> float:
        now = self._clock()
        self._roster.tell_time(now)
        return now

    def _new_job(self) -> MaskJob:
        if self._mask_jobs is None:
            self._mask_jobs = MaskJobs(self._runner.vocab_size, _NUM_MASK_THREADS)
        return self._mask_jobs.new()

    def _check(self, asked: EngineRequest) -> None:
        if self._closed_by is not None:
            raise Unavailable(f"the engine is closed: {self._closed_by.message}")
        for choice in range(asked.num_choices):
            name = sequence_id(asked.request_id, choice)
            if self._roster.is_in_use(name):
                raise InvalidRequest(f"request_id: {name!r} is in use by a live request", param="request_id")
        if not asked.prompt_token_ids:
            raise InvalidRequest("prompt: at least one token is needed", param="prompt")
        self._check_vocabulary("prompt", asked.prompt_token_ids)
        self._check_vocabulary("output_token_ids", asked.output_token_ids)
        asked.params.check_vocabulary(self._runner.vocab_size)
        if len(asked.output_token_ids) >= asked.params.max_tokens and not asked.prefill_only:
            raise InvalidRequest(
                f"output_token_ids: {len(asked.output_token_ids)} tokens are drawn already, but max_tokens is "
                f"{asked.params.max_tokens}", param="output_token_ids")
        if asked.num_choices > 1 and (asked.output_token_ids or asked.choice):
            raise InvalidRequest(
                f"n: one choice alone can be resumed or named, got n={asked.params.n}", param="n")
        self._check_length(len(asked.prompt_token_ids) + len(asked.output_token_ids))

    def _check_vocabulary(self, name: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._runner.vocab_size
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"{name}: token id {wrong} is outside the vocabulary 0..{vocab_size - 1}", param=name)

    def _check_length(self, num_tokens: int) -> None:
        num_needed, config = num_tokens + 1, self.config
        if num_needed > config.max_model_len:
            raise ContextLengthExceeded(
                f"prompt: {num_tokens} tokens and at least one of output exceed the model's context of "
                f"{config.max_model_len} tokens", param="prompt")
        if num_needed > self.max_total_tokens:
            raise ContextLengthExceeded(
                f"prompt: {num_tokens} tokens and at least one of output exceed this worker's KV pool of "
                f"{self.max_total_tokens} tokens", param="prompt")

    def _forget_departed(self) -> None:
        for request_id in self._roster.in_flight.take_departed():
            self._runner.forget(request_id)
