"""One engine: requests go in, tokens come out, step by step. Not thread-safe; `EngineLoop` gives it a thread.

    OPEN ──step (schedule, execute, update), add, abort──▶ OPEN
    OPEN ──close, or a step that fails──▶ CLOSED: every live request was answered, `add` and `reserve` are refused

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
from engine.grammar.state import GrammarState
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest, Request
from engine.scheduler import Scheduler
from engine.step import Runner, StepPlan, StepResult
from engine.step_meter import StepMeter

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


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
        self._runner = runner
        self._scheme = scheme
        self._clock = clock
        self._pool = BlockPool(config.num_blocks, max_kv_events)
        self._blocks = BlockManager(self._pool, scheme, config.enable_prefix_caching)
        self._scheduler = Scheduler(config, self._blocks, runner.eos_token_ids)
        self._closed_by: ShoalError | None = None
        self._num_leaked_blocks = 0
        self._meter = StepMeter()
        self._is_stalled = False

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of this id is live. May be asked from any thread."""
        return request_id in self._scheduler

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def is_stalled(self) -> bool:
        """The last step found nothing to do beside requests that wait: only a call or a deadline changes that."""
        return self._is_stalled

    @property
    def block_bytes(self) -> int:
        return self._runner.block_bytes

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of a block in place, `block_bytes` long and writable. May be taken in any thread."""
        return self._runner.block_view(block_id)

    def add(self, asked: EngineRequest, grammar: GrammarState | None = None) -> None:
        """Queue a request. The prompt is hashed here, once.

        Raises `InvalidRequest` (id in use, empty prompt, token outside the vocabulary, nothing left to draw),
        `ContextLengthExceeded`, `FingerprintMismatch`, `Overloaded`, or `Unavailable` once closed.
        """
        now = self._clock()
        self._check(asked)
        if self._scheduler.num_waiting >= self.config.max_num_waiting:
            wait_s = min(max(self._scheduler.longest_wait_s(now), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
            raise Overloaded(
                f"{self._scheduler.num_waiting} requests are waiting, the limit is {self.config.max_num_waiting}",
                retry_after_s=wait_s)
        self._scheduler.add(Request(asked, self._scheme, now))

    def reserve(self, asked: EngineRequest, grammar: GrammarState | None = None) -> Reservation:
        """Grant the blocks of all known tokens, cached ones shared, to a request whose KV comes from elsewhere.

        Until `start` it is neither scheduled nor preempted, and nothing but `release` or `close` ends it. Raises as
        `add` does; `Overloaded` when the pool has no room now, or when `max_awaiting_fraction` of it awaits KV.
        """
        self._check(asked)
        request = Request(asked, self._scheme, self._clock())
        self._scheduler.reserve(request)
        return Reservation(request.request_id, request.num_computed_tokens, request.block_ids)

    def land(self, request_id: str, num_tokens: int) -> None:
        """The KV of tokens `0 .. num_tokens - 1` is in the reserved blocks; full blocks become public.

        A lower count than an earlier one changes nothing. Raises `InvalidRequest` for a request that does not await
        KV, and for its last token, which always runs here.
        """
        self._scheduler.land(request_id, num_tokens)

    def start(self, request_id: str, num_cached_tokens: int | None = None) -> None:
        """Schedule a reserved request from its progress on, before those that wait without blocks.

        `num_cached_tokens`, when given, is how many prompt tokens nobody had to compute; else those of the
        reservation. Raises `InvalidRequest` for a request that does not await KV.
        """
        self._scheduler.start(request_id, num_cached_tokens)

    def release(self, request_id: str) -> None:
        """End a request in whatever state, free its blocks, and put nothing out. Idempotent."""
        self._scheduler.release(request_id)
        self._forget_departed()

    def block_ids(self, request_id: str) -> Sequence[int]:
        """The block table of a live request as it is now. Raises `InvalidRequest` for any other."""
        return self._scheduler.block_ids(request_id)

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
        """End a request and free its blocks at once; its last output.

        None if it is not live, or awaits KV: then it goes on until `release`.
        """
        output = self._scheduler.abort(request_id)
        self._forget_departed()
        return output

    def step(self) -> list[RequestOutput]:
        """One step. Raises `EngineFailed`, which carries the last outputs, if any of the three verbs raises."""
        try:
            started = self._clock()
            plan = self._scheduler.schedule(started)
            self._forget_departed()
            result = self._compute(plan) if plan.num_rows else StepResult(plan.step_id, ())
            outputs = self._scheduler.update(plan, result)
            self._forget_departed()
            self._is_stalled = not plan.num_rows and not outputs
            if plan.num_rows:
                self._meter.add(self._clock() - started, plan)
            return outputs
        except Exception as exc:
            raise EngineFailed(exc, self.close(InternalError(f"the engine failed: {exc}"))) from exc

    def _compute(self, plan: StepPlan) -> StepResult:
        self._runner.launch(plan)
        return self._runner.collect()

    def close(self, error: ShoalError) -> list[RequestOutput]:
        """End every live request with `error` and refuse new ones. Idempotent."""
        self._closed_by = self._closed_by or error
        return self._scheduler.fail_all(error)

    def stats(self) -> EngineStats:
        return replace(
            self._scheduler.stats(), num_blocks=self._pool.num_blocks, num_free_blocks=self._pool.num_grantable,
            num_leaked_blocks=self._num_leaked_blocks, num_pinned_blocks=self._pool.num_pinned,
            step_s=self._meter.step_s, prefill_tokens_per_s=self._meter.prefill_tokens_per_s)

    def take_kv_events(self) -> list[KvEvent]:
        """The events of retired steps since the last call, in order."""
        return self._pool.take_events()

    def reset_prefix_cache(self) -> int:
        """Forget all cached content that no live request uses; how many blocks that were."""
        return self._pool.clear()

    def check_integrity(self) -> None:
        """Count leaked blocks (see `stats`), then raise `LedgerError` unless every block has exactly one owner."""
        live = list(self._scheduler.live())
        self._num_leaked_blocks = self._blocks.count_leaked(live)
        self._blocks.check(live)

    def _check(self, asked: EngineRequest) -> None:
        if self._closed_by is not None:
            raise Unavailable(f"the engine is closed: {self._closed_by.message}")
        if asked.request_id in self._scheduler:
            raise InvalidRequest(f"request_id: {asked.request_id!r} is in use by a live request", param="request_id")
        if not asked.prompt_token_ids:
            raise InvalidRequest("prompt: at least one token is needed", param="prompt")
        self._check_vocabulary("prompt", asked.prompt_token_ids)
        self._check_vocabulary("output_token_ids", asked.output_token_ids)
        asked.params.check_vocabulary(self._runner.vocab_size)
        if len(asked.output_token_ids) >= asked.params.max_tokens and not asked.prefill_only:
            raise InvalidRequest(
                f"output_token_ids: {len(asked.output_token_ids)} tokens are drawn already, but max_tokens is "
                f"{asked.params.max_tokens}", param="output_token_ids")
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
        if num_needed > self._scheduler.max_total_tokens:
            raise ContextLengthExceeded(
                f"prompt: {num_tokens} tokens and at least one of output exceed this worker's KV pool of "
                f"{self._scheduler.max_total_tokens} tokens", param="prompt")

    def _forget_departed(self) -> None:
        for request_id in self._scheduler.take_departed():
            self._runner.forget(request_id)
