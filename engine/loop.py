"""The thread that runs an `EngineCore`, and the only way in for other threads.

    NEW ──start──▶ RUNNING ──stop──▶ CLOSED
                      └──a step or `on_step` raises──▶ CLOSED, then `on_fatal`

Commands (submit, abort, call) wait in one bounded queue and are applied in order between steps. On closing every
live request, every queued submit and every queued call is answered; later ones are refused at once.

A request with a grammar: submitted, or reserved ──compiled──▶ queued as a command, with its grammar's state
                                    └──abort, release, deadline──▶ gone: what the compiler brings is dropped
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    ShoalError,
    Unavailable,
)
from engine.block_pool import LedgerError
from engine.core import EngineCore, EngineFailed, Reservation
from engine.grammar.grammar_desk import CompilesGrammars, GrammarDesk
from engine.grammar.state import GrammarState
from engine.outputs import EngineStats, FinishReason, RequestOutput
from engine.request import EngineRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_WAIT_S = 1.0  # the longest sleep without a command, and the least time between integrity checks
STALLED_WAIT_S = 0.05  # the longest sleep while requests wait for blocks or a grammar: a deadline may pass
FULL_RETRY_AFTER_S = 1.0
ENGINE_THREAD = "engine-loop"


@dataclass(frozen=True, slots=True)
class _Submit:
    request: EngineRequest
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Answer:
    """The only output of a request that never reached the core."""

    output: RequestOutput


@dataclass(frozen=True, slots=True)
class _Call:
    run: Callable[[EngineCore], Any]
    future: Future[Any]


_Command = _Submit | _Abort | _Answer | _Call


@dataclass(frozen=True, slots=True, eq=False)
class _Compiling:
    """A request that waits for its grammar; `reserving` is None for a submitted one."""

    request: EngineRequest
    reserving: Future[Reservation] | None = None


class EngineLoop:
    """`on_step` gets each step's outputs and `on_fatal` the exception that ended the loop, both in the loop's thread.

    So does `after_turn`: the core, after the commands and the step of one turn. An id may be submitted again once its
    last output has been handed to `on_step`, or `release` has been called; where its KV was just being loaded from a
    lower tier, once the load has ended as well.
    """

    def __init__(
        self, core: EngineCore, on_step: Callable[[list[RequestOutput]], None],
        on_fatal: Callable[[Exception], None], *, max_commands: int = 1024,
        after_turn: Callable[[EngineCore], None] | None = None, grammar_compiler: CompilesGrammars | None = None,
    ) -> None:
        self._core = core
        self._on_step = on_step
        self._on_fatal = on_fatal
        self._after_turn = after_turn
        self._max_commands = max_commands
        self._grammars = GrammarDesk(grammar_compiler)
        self._wake = threading.Condition()  # guards the six fields below
        self._commands: deque[_Command] = deque()  # aborts come on top of max_commands, one per live id at most
        self._submitted: set[str] = set()  # ids of submits that the core has not yet taken
        self._aborting: set[str] = set()  # ids of aborts that the core has not yet taken
        self._compiling: dict[str, _Compiling] = {}  # by request id
        self._is_stopping = False
        self._closed_by: ShoalError | None = None
        self._stats = core.stats()
        self._is_unchecked = False
        self._checked_at = 0.0
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)

    @property
    def stats(self) -> EngineStats:
        """As of the last turn of the loop; costs nothing. Not to be changed."""
        return self._stats

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. If the engine refuses it, that becomes its only output, with the error.

        Raises `Overloaded` when the command queue is full, `InvalidRequest` for a live id or for a grammar that is
        known to be wrong, `Unavailable` once closed.
        """
        grammar = self._ready(request)
        with self._wake:
            if self._is_live(request.request_id):
                raise InvalidRequest(
                    f"request_id: {request.request_id!r} is in use by a live request", param="request_id")
            if request.params.grammar is None or grammar is not None:
                self._enqueue(_Submit(request, grammar))
            else:
                self._compile(_Compiling(request))
            self._submitted.add(request.request_id)

    def reserve(self, request: EngineRequest) -> Future[Reservation]:
        """As `call` with `core.reserve`, once its grammar is compiled; `release` or the deadline may end it before."""
        future: Future[Reservation] = Future()
        with self._wake:
            try:
                grammar = self._ready(request)
                if request.params.grammar is None or grammar is not None:
                    self._enqueue(_Call(lambda core: core.reserve(request, grammar), future))
                else:
                    self._compile(_Compiling(request, future))
            except ShoalError as error:
                future.set_exception(error)
        return future

    def release(self, request_id: str) -> Future[None]:
        """As `call` with `core.release`, whatever waits; also of a request that waits for its grammar."""
        with self._wake:
            waiting = self._compiling.pop(request_id, None)
            if waiting is not None and waiting.reserving is not None:
                _fail(waiting.reserving, Cancelled("the reservation was given up"))
            elif waiting is not None:
                self._submitted.discard(request_id)
        return self.call(lambda core: core.release(request_id), always=True)

    def abort(self, request_id: str) -> None:
        """Ask for a request's end; its last output has reason `abort` unless it ended before. Idempotent.

        A request that awaits KV is left alone: whoever fills its blocks releases it.
        """
        with self._wake:
            compiling = self._compiling.get(request_id)
            if compiling is not None and compiling.reserving is None:
                del self._compiling[request_id]
                self._commands.append(_Answer(_ended(compiling.request, FinishReason.ABORT)))
                self._wake.notify()
            elif request_id not in self._aborting and self._is_live(request_id):
                self._aborting.add(request_id)
                self._commands.append(_Abort(request_id))
                self._wake.notify()

    def call(self, run: Callable[[EngineCore], T], *, always: bool = False) -> Future[T]:
        """Run `run(core)` between two steps. The future fails with what it raises, or as `submit` is refused.

        `always`: also beyond a full queue, for what gives blocks back; bounded by what holds them.
        """
        future: Future[T] = Future()
        with self._wake:
            try:
                self._enqueue(_Call(run, future), always)
            except ShoalError as error:
                future.set_exception(error)
        return future

    def stop(self, timeout_s: float) -> None:
        """End live requests with `Unavailable` and join the thread; `TimeoutError` if a step takes longer."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._close(Unavailable("the engine has stopped"))
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine loop did not stop within {timeout_s} s")

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._submitted or request_id in self._core

    def _ready(self, request: EngineRequest) -> GrammarState | None:
        """The state of the request's grammar, if it has one that is compiled already."""
        return None if request.params.grammar is None else self._grammars.ready(request.params.grammar)

    def _compile(self, waiting: _Compiling) -> None:
        self._check_open()
        request = waiting.request
        if request.request_id in self._compiling:
            raise InvalidRequest(f"request_id: {request.request_id!r} is in use by a live request", param="request_id")
        assert request.params.grammar is not None
        compiled = self._grammars.begin(request.params.grammar)
        self._compiling[request.request_id] = waiting
        self._wake.notify()  # from now on a deadline may pass
        compiled.add_done_callback(lambda done: self._compiled(waiting, done))

    def _compiled(self, waiting: _Compiling, done: Future[GrammarState]) -> None:
        request = waiting.request
        with self._wake:
            if self._compiling.get(request.request_id) is not waiting or done.cancelled():
                return
            error = done.exception()
            if error is not None:
                self._refuse_compiling(waiting, _typed(error))
                return
            del self._compiling[request.request_id]
            self._commands.append(_Submit(request, done.result()) if waiting.reserving is None else _Call(
                lambda core: core.reserve(request, done.result()), waiting.reserving))
            self._wake.notify()

    def _refuse_compiling(self, waiting: _Compiling, error: ShoalError) -> None:
        del self._compiling[waiting.request.request_id]
        if waiting.reserving is None:
            self._commands.append(_Answer(_refusal(waiting.request, error)))
            self._wake.notify()
        else:
            _fail(waiting.reserving, error)

    def _expire_compiling(self) -> None:
        now = time.monotonic()
        for waiting in list(self._compiling.values()):
            deadline = waiting.request.deadline
            if deadline is not None and deadline <= now:
                self._refuse_compiling(waiting, DeadlineExceeded(
                    f"the deadline passed {now - deadline:.3f} s ago, while the grammar was compiled"))

    def _check_open(self) -> None:
        if self._closed_by is not None or self._is_stopping:
            raise Unavailable(self._closed_by.message if self._closed_by else "the engine is stopping")

    def _enqueue(self, command: _Command, always: bool = False) -> None:
        self._check_open()
        if len(self._commands) >= self._max_commands and not always:
            raise Overloaded(
                f"{len(self._commands)} commands are queued, the limit is {self._max_commands}",
                retry_after_s=FULL_RETRY_AFTER_S)
        self._commands.append(command)
        self._wake.notify()

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._turn()
            self._close(Unavailable("the engine has stopped"))
        except EngineFailed as failed:
            log.exception("engine failed")
            self._close(InternalError(str(failed)), failed.outputs)
            self._on_fatal(failed.cause)
        except Exception as exc:
            log.exception("engine loop failed")
            self._close(InternalError(f"the engine loop failed: {exc}"))
            self._on_fatal(exc)

    def _turn(self) -> None:
        """Commands, then a step if there is work; one integrity check after work has ended."""
        self._hand_out([output for command in self._next_commands() for output in self._apply(command)])
        if self._core.has_work:
            self._hand_out(self._core.step())
            self._is_unchecked = True
        elif self._is_unchecked and time.monotonic() - self._checked_at >= IDLE_WAIT_S:
            self._check()
        if self._after_turn is not None:
            self._after_turn(self._core)

    def _next_commands(self) -> list[_Command]:
        with self._wake:
            if not (self._commands or self._is_stopping):
                if not self._core.has_work:
                    self._wake.wait(STALLED_WAIT_S if self._compiling else IDLE_WAIT_S)
                elif self._core.is_stalled:
                    self._wake.wait(STALLED_WAIT_S)
            self._expire_compiling()
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _apply(self, command: _Command) -> list[RequestOutput]:
        match command:
            case _Submit():
                try:
                    self._core.add(command.request, command.grammar)
                except ShoalError as error:
                    return [_refusal(command.request, error)]
                finally:
                    with self._wake:
                        self._submitted.discard(command.request.request_id)
            case _Answer():
                with self._wake:
                    self._submitted.discard(command.output.request_id)
                return [command.output]
            case _Abort():
                with self._wake:
                    self._aborting.discard(command.request_id)
                output = self._core.abort(command.request_id)
                return [output] if output else []
            case _Call():
                if command.future.set_running_or_notify_cancel():
                    try:
                        command.future.set_result(command.run(self._core))
                    except Exception as exc:
                        command.future.set_exception(exc)
        return []

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        self._stats = self._core.stats()
        if not outputs:
            return
        self._on_step(outputs)

    def _check(self) -> None:
        self._is_unchecked = False
        self._checked_at = time.monotonic()
        try:
            self._core.check_integrity()
        except LedgerError:
            log.exception("block ledger is broken")
        self._stats = self._core.stats()

    def _close(self, error: ShoalError, outputs: list[RequestOutput] | None = None) -> None:
        """Answer everything with `error`, after `outputs`. From here on nothing is accepted."""
        with self._wake:
            self._closed_by = error
            commands = list(self._commands)
            self._commands.clear()
            self._submitted.clear()
            compiling = list(self._compiling.values())
            self._compiling.clear()
        self._grammars.close()
        outputs = (outputs or []) + self._core.close(error)
        for command in commands:
            if isinstance(command, _Submit):
                outputs.append(_refusal(command.request, error))
            elif isinstance(command, _Answer):
                outputs.append(command.output)
            elif isinstance(command, _Call):
                _fail(command.future, error)
        for waiting in compiling:
            if waiting.reserving is None:
                outputs.append(_refusal(waiting.request, error))
            else:
                _fail(waiting.reserving, error)
        try:
            self._hand_out(outputs)
        except Exception:
            log.exception("the last outputs could not be handed out")


def _refusal(request: EngineRequest, error: ShoalError) -> RequestOutput:
    return _ended(request, FinishReason.ERROR, error)


def _ended(request: EngineRequest, reason: FinishReason, error: ShoalError | None = None) -> RequestOutput:
    return RequestOutput(
        request.request_id, finish_reason=reason, error=error, num_prompt_tokens=len(request.prompt_token_ids))


def _fail(future: Future[Any], error: ShoalError) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _typed(error: BaseException) -> ShoalError:
    return error if isinstance(error, ShoalError) else InternalError(f"the grammar could not be compiled: {error}")
