"""One engine: requests go in, tokens come out, step by step. Not thread-safe; `EngineLoop` gives it a thread.

    OPEN ──step (schedule, execute, update), add, abort──▶ OPEN
    OPEN ──close, or a step that fails──▶ CLOSED: every live request was answered, `add` is refused

The same object runs with a torch runner or with the mock, under a worker or under the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from common.block_hash import HashScheme
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
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest, Request
from engine.scheduler import Scheduler
from engine.step import Runner, StepResult

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 30.0


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

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, asked: EngineRequest) -> None:
        """Queue a request. The prompt is hashed here, once.

        Raises `InvalidRequest` (id in use, empty prompt, token outside the vocabulary), `ContextLengthExceeded`,
        `FingerprintMismatch`, `Overloaded`, or `Unavailable` once closed.
        """
        if self._closed_by is not None:
            raise Unavailable(f"the engine is closed: {self._closed_by.message}")
        if asked.request_id in self._scheduler:
            raise InvalidRequest(f"request_id: {asked.request_id!r} is in use by a live request", param="request_id")
        self._check_prompt(asked.prompt_token_ids)
        asked.params.check_vocabulary(self._runner.vocab_size)
        now = self._clock()
        if self._scheduler.num_waiting >= self.config.max_num_waiting:
            wait_s = min(max(self._scheduler.longest_wait_s(now), MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
            raise Overloaded(
                f"{self._scheduler.num_waiting} requests are waiting, the limit is {self.config.max_num_waiting}",
                retry_after_s=wait_s)
        self._scheduler.add(Request(asked, self._scheme, now))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its blocks at once; its last output, or None if it is not live."""
        output = self._scheduler.abort(request_id)
        self._forget_departed()
        return output

    def step(self) -> list[RequestOutput]:
        """One step. Raises `EngineFailed`, which carries the last outputs, if any of the three verbs raises."""
        try:
            plan = self._scheduler.schedule(self._clock())
            self._forget_departed()
            result = self._runner.execute(plan) if plan.rows else StepResult(plan.step_id, ())
            outputs = self._scheduler.update(plan, result)
            self._forget_departed()
            return outputs
        except Exception as exc:
            raise EngineFailed(exc, self.close(InternalError(f"the engine failed: {exc}"))) from exc

    def close(self, error: ShoalError) -> list[RequestOutput]:
        """End every live request with `error` and refuse new ones. Idempotent."""
        self._closed_by = self._closed_by or error
        return self._scheduler.fail_all(error)

    def stats(self) -> EngineStats:
        return replace(
            self._scheduler.stats(), num_blocks=self._pool.num_blocks, num_free_blocks=self._pool.num_grantable,
            num_leaked_blocks=self._num_leaked_blocks)

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

    def _check_prompt(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidRequest("prompt: at least one token is needed", param="prompt")
        low, high, vocab_size = min(token_ids), max(token_ids), self._runner.vocab_size
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(
                f"prompt: token id {wrong} is outside the vocabulary 0..{vocab_size - 1}", param="prompt")
        num_needed, config = len(token_ids) + 1, self.config
        if num_needed > config.max_model_len:
            raise ContextLengthExceeded(
                f"prompt: {len(token_ids)} tokens and at least one of output exceed the model's context of "
                f"{config.max_model_len} tokens", param="prompt")
        if num_needed > self._scheduler.max_total_tokens:
            raise ContextLengthExceeded(
                f"prompt: {len(token_ids)} tokens and at least one of output exceed this worker's KV pool of "
                f"{self._scheduler.max_total_tokens} tokens", param="prompt")

    def _forget_departed(self) -> None:
        for request_id in self._scheduler.take_departed():
            self._runner.forget(request_id)
