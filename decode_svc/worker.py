"""One engine and the callers whose requests it runs.

States of a `Session` (one caller's stream): open → closed. Closing ends all its live requests, so that a caller that
vanishes leaves no block behind. A request belongs to the session that submitted it, from `submit` to the delta with a
finish reason; until the scheduler has it, a task brings its KV (decode_svc/admission.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from common import logs, trace
from common.errors import Cancelled, InternalError, InvalidRequest, ShoalError, Unavailable
from common.generation import FinishReason, Generation, TokenDelta
from common.kv_event import KvEvent
from decode_svc.admission import KvAdmission
from decode_svc.request_meter import RequestMeter
from decode_svc.request_spans import RequestSpans
from engine.engine_port import EnginePort, Fetch
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest

log = logs.get(__name__)

MAX_UNREAD_DELTAS = 262_144  # of one caller; beyond it the caller is taken for dead


class DecodeWorker:
    """Joins an engine to its callers; all of it lives in the event loop.

    `on_kv_events` gets what the engine cached and dropped, `on_fatal` why the engine cannot go on.
    """

    def __init__(
        self, model: str, on_kv_events: Callable[[Sequence[KvEvent]], None], on_fatal: Callable[[str], None]
    ) -> None:
        self._model, self._tell_kv_events, self._on_fatal = model, on_kv_events, on_fatal
        self._engine: EnginePort | None = None
        self.meter, self.spans = RequestMeter(), RequestSpans()
        self._admission: KvAdmission | None = None
        self._owners: dict[str, Session] = {}
        self._open_choices: dict[str, int] = {}  # of requests with more than one, how many have not ended
        self._admitting: dict[str, asyncio.Task[None]] = {}
        self._fetching: set[asyncio.Task[None]] = set()
        self._accepts = True

    @property
    def engine(self) -> EnginePort:
        assert self._engine is not None, "not started"
        return self._engine

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    @property
    def num_admitting(self) -> int:
        return len(self._admitting)

    def start(self, engine: EnginePort, admission: KvAdmission) -> None:
        """`engine` runs, and this worker is its listener."""
        self._engine, self._admission = engine, admission

    def open_session(self) -> Session:
        return Session(self)

    async def drain(self) -> None:
        """Refuse new requests; return when no request lives."""
        self._accepts = False
        while self._owners:
            await asyncio.sleep(0.05)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Answer what is left with an error and join the engine's thread."""
        self._accepts = False
        admitting = list(self._admitting)
        for request_id in admitting:
            owner = self._owners.pop(request_id, None)
            if owner is not None:
                owner.deliver([TokenDelta(request_id, (), FinishReason.ERROR, Unavailable(
                    "the worker is stopping", retry_after_s=1.0))])
            self._end_admission(request_id)
        if self._admitting:
            await asyncio.wait(self._admitting.values(), timeout=timeout_s)
        if self._engine is not None:
            await self._engine.stop(timeout_s)
        if self._fetching:  # they read the store, which is closed after this
            await asyncio.wait(self._fetching, timeout=timeout_s)

    async def reset_prefix_cache(self) -> int:
        """Drop cached blocks that no live request uses; returns how many."""
        return await self.engine.reset_prefix_cache()

    def submit(self, session: Session, generation: Generation) -> None:
        """Refusals become the request's only delta; a session that is closed has nobody to answer."""
        if session.closed:
            return
        try:
            self._check(generation)
        except ShoalError as error:
            self.meter.refused_at_once(error)
            session.deliver([_refusal(generation, error)])
            return
        self._owners[generation.request_id] = session
        if generation.params.n > 1:
            self._open_choices[generation.request_id] = generation.params.n
        self.meter.submitted(generation)
        self.spans.submitted(generation)
        task = asyncio.create_task(self._admit(generation))
        self._admitting[generation.request_id] = task
        task.add_done_callback(lambda done: self._admitted(generation, done))

    def abort(self, session: Session, request_id: str) -> None:
        if self._owners.get(request_id) is session:
            self._end(request_id)

    def close_session(self, session: Session) -> None:
        left = [request_id for request_id, owner in self._owners.items() if owner is session]
        for request_id in left:
            self._end(request_id)
        if left:
            log.info("session_closed", aborted=len(left))

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        self.meter.on_outputs(outputs)
        self.spans.on_outputs(outputs)
        by_session: dict[Session, list[TokenDelta]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                by_session.setdefault(owner, []).append(_delta(output))
                if output.finish_reason is not None and self._is_last(output):
                    del self._owners[output.request_id]
        for session, deltas in by_session.items():
            session.deliver(deltas)

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        self._tell_kv_events(events)

    def on_fetches(self, fetches: Sequence[Fetch]) -> None:
        for fetch in fetches:
            task = asyncio.create_task(self._serve_fetch(fetch))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)

    def on_failed(self, why: str) -> None:
        self._on_fatal(why)

    def _is_last(self, output: RequestOutput) -> bool:
        """Whether the request ends with this last output of a choice."""
        left = self._open_choices.pop(output.request_id, 1) - 1
        if left == 0 or output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return True
        self._open_choices[output.request_id] = left
        return False

    def _check(self, generation: Generation) -> None:
        if not self._accepts:
            raise Unavailable("the worker is draining", retry_after_s=1.0)
        if generation.model != self._model:
            raise InvalidRequest(f"model: this worker serves {self._model!r}", param="model")
        if generation.request_id in self._owners:
            raise InvalidRequest("request_id: in use by a live request", param="request_id")

    async def _serve_fetch(self, fetch: Fetch) -> None:
        assert self._admission is not None
        await self._admission.serve_fetch(fetch)

    async def _admit(self, generation: Generation) -> None:
        assert self._admission is not None
        trace.adopt(generation.trace_context)  # this task is the request's alone
        await self._admission.admit(generation, _engine_request(generation))

    def _admitted(self, generation: Generation, task: asyncio.Task[None]) -> None:
        """Also of a task that was cancelled before its first step."""
        del self._admitting[generation.request_id]
        error = _refused_because(task)
        if error is not None:
            self.meter.refused(generation.request_id, error)
            self.spans.refused(generation.request_id)
        owner = self._owners.pop(generation.request_id, None) if error is not None else None
        if error is not None:
            self._open_choices.pop(generation.request_id, None)
        if owner is not None and error is not None:
            owner.deliver([_refusal(generation, error)])

    def _end(self, request_id: str) -> None:
        """Abort it where it is: a task that brings its KV must first let go of its blocks."""
        task = self._admitting.get(request_id)
        if task is None or task.done():  # done: the scheduler has it, though `_admitted` has not run yet
            self.engine.abort(request_id)
        else:
            self._end_admission(request_id)

    def _end_admission(self, request_id: str) -> None:
        task = self._admitting[request_id]
        if not task.cancelling():
            task.cancel()


class Session:
    """One caller's requests. Deltas of one engine step come out together."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._unread: list[TokenDelta] = []
        self._ready = asyncio.Event()
        self.closed = False

    def submit(self, generation: Generation) -> None:
        self._worker.submit(self, generation)

    def abort(self, request_id: str) -> None:
        self._worker.abort(self, request_id)

    async def next_deltas(self, wait_s: float) -> list[TokenDelta]:
        """Everything unread; empty after `wait_s` without any, or once `closed`."""
        if not self._unread and not self.closed:
            self._ready.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._ready.wait()
            except TimeoutError:
                return []
        deltas, self._unread = self._unread, []
        return deltas

    def deliver(self, deltas: list[TokenDelta]) -> None:
        if self.closed:
            return
        self._unread.extend(deltas)
        self._ready.set()
        if len(self._unread) > MAX_UNREAD_DELTAS:
            log.error("session_too_slow", unread=len(self._unread))
            self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._ready.set()
            self._worker.close_session(self)


def _refused_because(admitting: asyncio.Task[None]) -> ShoalError | None:
    if admitting.cancelled():
        return Cancelled("the caller gave the request up")
    fault = admitting.exception()
    if fault is None or isinstance(fault, ShoalError):
        return fault
    log.error("admission_failed", exc_info=fault)
    return InternalError(f"the request could not be admitted: {type(fault).__name__}")


def _engine_request(generation: Generation) -> EngineRequest:
    return EngineRequest(
        request_id=generation.request_id, prompt_token_ids=generation.prompt_token_ids, params=generation.params,
        adapter=generation.adapter, cache_salt=generation.cache_salt, block_hashes=generation.block_hashes,
        deadline=time.monotonic() + generation.timeout_s if generation.timeout_s else None,
        output_token_ids=generation.output_token_ids, choice=generation.choice, priority=generation.priority)


def _refusal(generation: Generation, error: ShoalError) -> TokenDelta:
    return TokenDelta(
        generation.request_id, (), FinishReason.ERROR, error, num_prompt_tokens=len(generation.prompt_token_ids))


def _delta(output: RequestOutput) -> TokenDelta:
    return TokenDelta(
        request_id=output.request_id, token_ids=output.new_token_ids, finish_reason=output.finish_reason,
        error=output.error, stop_token_id=output.stop_token_id, num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens, num_output_tokens=output.num_output_tokens,
        queue_s=output.queue_s, choice=output.choice, logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs, timing=output.timing)
