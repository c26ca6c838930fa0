"""What runs in an engine's own process.

States: started → loading (signs of life go out) → ready → ended, by `Stop`, by a step that fails, by commands that
cannot be read, or when the worker is gone: the end of its stream ends this process at once, in every state. Signals
that stop a worker's whole group are left to the worker, which drains first.

Two threads: this one reads commands, the engine's own steps and sends one message per turn.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from common import logs
from common.errors import InternalError, ShoalError
from engine import block_memory
from engine.core import EngineCore
from engine.loop import ENGINE_THREAD, EngineLoop
from engine.model_engine import ModelEngine
from engine.outputs import FinishReason, RequestOutput
from engine.process import messages
from engine.process.life_signs import LifeSigns
from engine.store_swap import StoreSwap
from engine.worker_config import WorkerConfig

log = logs.get(__name__)
T = TypeVar("T")

STOP_S = 10.0  # the longest wait for a step in hand
_SEND_BUFFER_BYTES = 4 << 20


def run(socket_fd: int, memory_fd: int) -> None:
    """Returns when the engine has ended."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=socket_fd) as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        inbox = _Inbox(worker)
        start = messages.start_decoder.decode(inbox.next())
        logs.setup(*start.log)
        engine = _load(start, memory_fd, worker)
        if engine is not None:
            _Child(engine, worker).serve(inbox)


def _load(start: messages.Start, memory_fd: int, worker: socket.socket) -> ModelEngine | None:
    """None when it failed; the worker has been told why. A worker that goes away meanwhile ends the process."""
    watched = threading.Thread(target=_end_with, args=(worker,), daemon=True)
    watched.start()
    signs = LifeSigns(worker)
    signs.start()
    outcome: ModelEngine | ShoalError
    try:
        outcome = ModelEngine.load(
            WorkerConfig(**start.config), start.model, start.hash_key, allocate=block_memory.shared(memory_fd),
            progress=signs.progress)
    except Exception as error:
        if not isinstance(error, ShoalError):
            log.exception("engine_did_not_load")
        outcome = error if isinstance(error, ShoalError) else InternalError(f"the engine did not load: {error!r}")
    signs.stop()
    if isinstance(outcome, ShoalError):
        worker.sendall(messages.frame(messages.Failed(outcome)))
        return None
    worker.sendall(messages.frame(messages.Ready(outcome.facts, outcome.core.stats())))
    return outcome


def _end_with(worker: socket.socket) -> None:
    """The worker says nothing while the model loads; what there is to read first is its end, or its first command."""
    try:
        is_over = not worker.recv(1, socket.MSG_PEEK)
    except OSError:  # a reset: the worker went with signs of life unread
        is_over = True
    if is_over:
        os._exit(1)


class _Inbox:
    """Messages of the worker; its end ends the process."""

    def __init__(self, worker: socket.socket) -> None:
        self._stream = worker.makefile("rb", buffering=1 << 20)

    def next(self) -> bytes:
        (size,) = messages.LENGTH.unpack(self._read(messages.LENGTH.size))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        try:
            got: bytes = self._stream.read(size)
        except OSError:  # a reset: the worker went with turns unread
            got = b""
        if len(got) < size:
            os._exit(1)
        return got


class _Child:
    """Joins an engine's loop to the worker's stream."""

    def __init__(self, engine: ModelEngine, worker: socket.socket) -> None:
        self._worker = worker
        self._outputs: deque[RequestOutput] = deque()
        self._answers: deque[messages.Answer] = deque()
        self._loop = EngineLoop(
            engine.core, self._outputs.extend, self._on_fatal, after_turn=self._send_turn,
            grammar_compiler=engine.grammar_compiler)
        self._core = engine.core
        self._swap = StoreSwap(engine.core.block_bytes)
        engine.core.use_swap(self._swap)

    def serve(self, inbox: _Inbox) -> None:
        self._loop.start()
        while True:
            try:
                commands = messages.commands_decoder.decode(inbox.next())
            except msgspec.DecodeError as error:  # whose command it was is not known
                log.exception("commands_cannot_be_read")
                self._stop(f"the engine's process cannot read its commands: {error}")
                return
            for command in commands:
                if isinstance(command, messages.Stop):
                    self._stop()
                    return
                self._apply(command)

    def _apply(self, command: messages.Submit | messages.Abort | messages.LoadRate | messages.Call) -> None:
        match command:
            case messages.Submit():
                try:
                    self._loop.submit(messages.unpacked(command.request))
                except ShoalError as error:
                    self._refuse(command.request_id, error)
            case messages.Abort():
                self._loop.abort(command.request_id)
            case messages.LoadRate():
                self._swap.bytes_per_s = command.bytes_per_s
            case _:
                self._begin(command).add_done_callback(partial(self._answer, command.call_id))

    def _begin(self, command: messages.Call) -> Future[Any]:
        loop = self._loop
        match command:
            case messages.Reserve():
                try:
                    return loop.reserve(messages.unpacked(command.request))
                except ShoalError as error:
                    refused: Future[Any] = Future()
                    refused.set_exception(error)
                    return refused
            case messages.Land():
                return loop.call(lambda core: core.land(command.request_id, command.num_tokens))
            case messages.StartReserved():
                return loop.call(lambda core: core.start(command.request_id, command.num_cached_tokens))
            case messages.EndFetch():
                return loop.call(lambda core: core.start(command.sequence_id), always=True)
            case messages.Release():
                return loop.release(command.request_id)
            case messages.Pin():
                return loop.call(lambda core: core.pin(command.hashes))
            case messages.Unpin():
                return loop.call(lambda core: core.unpin(command.block_ids), always=True)
            case messages.ResetPrefixCache():
                return loop.call(EngineCore.reset_prefix_cache)

    def _refuse(self, request_id: str, error: ShoalError) -> None:
        self._outputs.append(RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error))
        self._wake()

    def _answer(self, call_id: int, done: Future[Any]) -> None:
        """In the engine's thread, or in another for a call that never came to it."""
        error = done.exception()
        if error is None:
            self._answers.append(messages.Answer(call_id, done.result()))
        else:
            self._answers.append(messages.Answer(call_id, error=error if isinstance(error, ShoalError) else (
                InternalError(f"the engine's call failed: {error!r}"))))
        if threading.current_thread().name != ENGINE_THREAD:
            self._wake()

    def _wake(self) -> None:
        """What was put down here goes out with a turn, which there would be none of in an idle engine."""
        self._loop.call(lambda core: None, always=True)

    def _send_turn(self, core: EngineCore, fatal: str | None = None) -> None:
        turn = messages.Turn(
            _taken(self._outputs), messages.events_to_wire(core.take_kv_events()), _taken(self._answers),
            self._swap.take_fetches(), self._loop.stats, fatal)
        try:
            self._worker.sendall(messages.frame(turn))
        except OSError:
            os._exit(1)

    def _on_fatal(self, error: Exception) -> None:
        self._send_turn(self._core, f"the engine failed: {error}")
        self._worker.shutdown(socket.SHUT_WR)

    def _stop(self, fatal: str | None = None) -> None:
        try:
            self._loop.stop(STOP_S)
        except TimeoutError:
            log.error("engine_does_not_stop", limit_s=STOP_S)
            os._exit(1)
        self._send_turn(self._core, fatal)


def _taken(items: deque[T]) -> list[T]:
    """All there are; others may go on adding."""
    return [items.popleft() for _ in range(len(items))]
