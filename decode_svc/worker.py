"""One engine and the callers whose requests it runs.

States of a `Session` (one caller's stream): open → closed. Closing aborts all its live requests, so that a caller
that vanishes leaves no block behind. A request belongs to the session that submitted it, from `submit` to the
delta with a finish reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from common import logs
from common.errors import InvalidRequest, ShoalError, Unavailable
from common.generation import FinishReason, Generation, TokenDelta
from engine.core import EngineCore
from engine.loop import EngineLoop
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest

log = logs.get(__name__)

MAX_UNREAD_DELTAS = 262_144  # of one caller; beyond it the caller is taken for dead


class DecodeWorker:
    """Joins an `EngineLoop` to asyncio. `on_fatal` is called, in the event loop, when the engine cannot go on."""

    def __init__(self, core: EngineCore, model: str, on_fatal: Callable[[str], None]) -> None:
        self._model = model
        self._on_fatal = on_fatal
        self._engine = EngineLoop(core, self._on_step, self._on_engine_fatal)
        self._owners: dict[str, Session] = {}  # request id → session; only the event loop touches it
        self._sessions: set[Session] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accepts = True

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def num_live(self) -> int:
        return len(self._owners)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine.start()

    def open_session(self) -> Session:
        session = Session(self)
        self._sessions.add(session)
        return session

    async def drain(self) -> None:
        """Refuse new requests; return when no request lives."""
        self._accepts = False
        while self._owners:
            await asyncio.sleep(0.05)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Answer what is left with an error and join the engine's thread."""
        self._accepts = False
        await asyncio.to_thread(self._engine.stop, timeout_s)
        await asyncio.sleep(0)  # lets the last deltas reach their sessions

    async def reset_prefix_cache(self) -> int:
        """Drop cached blocks that no live request uses; returns how many."""
        return await asyncio.wrap_future(self._engine.call(EngineCore.reset_prefix_cache))

    def submit(self, session: Session, generation: Generation) -> None:
        """Refusals become the request's only delta."""
        try:
            if not self._accepts:
                raise Unavailable("the worker is draining", retry_after_s=1.0)
            if generation.model != self._model:
                raise InvalidRequest(f"model: this worker serves {self._model!r}", param="model")
            if generation.request_id in self._owners:
                raise InvalidRequest("request_id: in use by a live request", param="request_id")
            self._engine.submit(_engine_request(generation))
            self._owners[generation.request_id] = session
        except ShoalError as error:
            session.deliver([TokenDelta(
                generation.request_id, (), FinishReason.ERROR, error,
                num_prompt_tokens=len(generation.prompt_token_ids))])

    def abort(self, session: Session, request_id: str) -> None:
        if self._owners.get(request_id) is session:
            self._engine.abort(request_id)

    def close_session(self, session: Session) -> None:
        self._sessions.discard(session)
        left = [request_id for request_id, owner in self._owners.items() if owner is session]
        for request_id in left:
            self._engine.abort(request_id)
        if left:
            log.info("session_closed", aborted=len(left))

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        try:
            self._deliver_by_session(outputs)
        except Exception as error:  # a delta that is lost would be a stream that hangs
            log.exception("delivery_failed")
            self._on_fatal(f"tokens could not be delivered: {error}")

    def _deliver_by_session(self, outputs: list[RequestOutput]) -> None:
        by_session: dict[Session, list[TokenDelta]] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is not None:
                by_session.setdefault(owner, []).append(_delta(output))
                if output.finish_reason is not None:
                    del self._owners[output.request_id]
        for session, deltas in by_session.items():
            session.deliver(deltas)

    def _on_engine_fatal(self, error: Exception) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._on_fatal, f"the engine failed: {error}")


class Session:
    """One caller's requests. Deltas of one engine step come out together."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker
        self._unread: list[TokenDelta] = []
        self._ready = asyncio.Event()
        self._closed = False

    def submit(self, generation: Generation) -> None:
        self._worker.submit(self, generation)

    def abort(self, request_id: str) -> None:
        self._worker.abort(self, request_id)

    async def next_deltas(self) -> list[TokenDelta]:
        """Everything unread, at least one; empty once closed."""
        while not self._unread and not self._closed:
            self._ready.clear()
            await self._ready.wait()
        deltas, self._unread = self._unread, []
        return deltas

    def deliver(self, deltas: list[TokenDelta]) -> None:
        if self._closed:
            return
        self._unread.extend(deltas)
        self._ready.set()
        if len(self._unread) > MAX_UNREAD_DELTAS:
            log.error("session_too_slow", unread=len(self._unread))
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._ready.set()
            self._worker.close_session(self)


def _engine_request(generation: Generation) -> EngineRequest:
    return EngineRequest(
        request_id=generation.request_id, prompt_token_ids=generation.prompt_token_ids, params=generation.params,
        adapter=generation.adapter, cache_salt=generation.cache_salt, block_hashes=generation.block_hashes,
        deadline=time.monotonic() + generation.timeout_s if generation.timeout_s else None)


def _delta(output: RequestOutput) -> TokenDelta:
    return TokenDelta(
        request_id=output.request_id, token_ids=output.new_token_ids, finish_reason=output.finish_reason,
        error=output.error, stop_token_id=output.stop_token_id, num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens, num_output_tokens=output.num_output_tokens,
        queue_s=output.queue_s)
