"""An engine in its own process, as an `EnginePort`.

States: new → starting (`start`) → running → stopped (`stop`), or → lost: the process ended by itself or its engine
failed. Then every live request is answered with `WorkerLost`, every call with `Unavailable`, and the listener is told;
it is for whoever runs the worker to start it again, with a new incarnation, because the cache is gone too.

Commands of one turn of the event loop go out as one message. KV bytes are not sent: both processes map them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from common import logs
from common.block_hash import BlockHash
from common.config import ServiceConfig
from common.errors import InternalError, InvalidRequest, Overloaded, ShoalError, Unavailable, WorkerLost
from engine import block_memory
from engine.core import Reservation
from engine.engine_port import EngineFacts, EngineListener
from engine.outputs import EngineStats, FinishReason, RequestOutput
from engine.process import messages
from engine.request import EngineRequest
from engine.worker_config import WorkerConfig

log = logs.get(__name__)
T = TypeVar("T")

MAX_CALLS = 1024  # unanswered; what gives blocks back comes on top
EXIT_S = 5.0  # how long a process that is done may take to be gone
STALL_S = 120.0  # the longest silence of a process that starts; while its model loads it tells that it lives
_STREAM_LIMIT = 4 << 20


class EngineProcess:
    """`start` it in the event loop that its listener lives in."""

    def __init__(self, config: WorkerConfig, model: str, hash_key: bytes, listener: EngineListener) -> None:
        self._start = messages.Start(
            config=config.model_dump(include=set(WorkerConfig.model_fields) - set(ServiceConfig.model_fields)),
            model=model, hash_key=hash_key,
            log=(f"{config.service}-engine", config.service_id, config.log_level, config.log_format))
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: memoryview | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._facts: EngineFacts | None = None
        self._stats = EngineStats()
        self._live: dict[str, int] = {}  # request id -> choices that have not ended
        self._reserved: dict[str, int] = {}  # the same, of those that are not started
        self._calls: dict[int, tuple[asyncio.Future[Any], Any]] = {}  # call id -> who waits, type of the result
        self._num_calls = 0
        self._outbox: list[messages.Command] = []
        self._ended: str | None = None  # why nothing is accepted any more

    @property
    def facts(self) -> EngineFacts:
        assert self._facts is not None, "not started"
        return self._facts

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def block_view(self, block_id: int) -> memoryview:
        size = self.facts.block_bytes
        if self._memory is None:
            raise BufferError(f"block {block_id} is in device memory, which cannot be read in place")
        if not 0 <= block_id < len(self._memory) // size:
            raise IndexError(f"block {block_id} is outside the pool of {len(self._memory) // size}")
        return self._memory[block_id * size : (block_id + 1) * size]

    async def start(self) -> None:
        """Return when the engine can step. Raises what its loading raised."""
        memory_fd = os.memfd_create("shoal-kv", os.MFD_CLOEXEC)
        try:
            await self._connect(memory_fd)
            await self._wait_ready()
            if self.facts.has_host_blocks:
                self._memory = block_memory.mapped(memory_fd)
        except BaseException:
            await self._end_process()
            raise
        finally:
            os.close(memory_fd)
        self._reading = asyncio.create_task(self._read())

    async def _connect(self, memory_fd: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._fork(theirs.fileno(), memory_fd)
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_STREAM_LIMIT)
        finally:
            if self._writer is None:  # its end tells the process
                ours.close()
        self._writer.write(messages.frame(self._start))

    async def _fork(self, socket_fd: int, memory_fd: int) -> None:
        """A cancellation waits for the fork in hand: until then the descriptors stay open."""
        forking = asyncio.create_task(asyncio.to_thread(
            subprocess.Popen, [sys.executable, "-m", "engine.process", str(socket_fd), str(memory_fd)],
            pass_fds=(socket_fd, memory_fd), stdin=subprocess.DEVNULL))
        is_cancelled = False
        while not forking.done():
            try:
                await asyncio.wait({forking})
            except asyncio.CancelledError:
                is_cancelled = True
        self._process = forking.result()
        if is_cancelled:
            raise asyncio.CancelledError

    async def stop(self, timeout_s: float = 10.0) -> None:
        if self._reading is not None and self._ended is None:
            self._ended = "the engine is stopping"
            self._send(messages.Stop())
            await asyncio.wait({self._reading}, timeout=timeout_s)
            self._lose("the engine has stopped", Unavailable("the engine has stopped"))
        if self._reading is not None:
            self._reading.cancel()
        await self._end_process()

    def submit(self, request: EngineRequest) -> None:
        self._check_open()
        if request.request_id in self._live:
            raise InvalidRequest(f"request_id: {request.request_id!r} is in use by a live request", param="request_id")
        command = messages.Submit(request.request_id, messages.packed(request))
        self._live[request.request_id] = request.params.n
        self._send(command)

    def abort(self, request_id: str) -> None:
        if self._ended is None:
            self._send(messages.Abort(request_id))

    async def reserve(self, request: EngineRequest) -> Reservation:
        call = messages.Reserve(self._next_call(), messages.packed(request))
        if request.request_id in self._reserved:
            raise InvalidRequest(f"request_id: {request.request_id!r} is in use by a live request", param="request_id")
        self._reserved[request.request_id] = request.params.n
        try:
            return await self._call(call, Reservation)
        except ShoalError:
            self._reserved.pop(request.request_id, None)
            raise

    async def land(self, request_id: str, num_tokens: int) -> None:
        await self._call(messages.Land(self._next_call(), request_id, num_tokens), None)

    async def start_reserved(self, request_id: str, num_cached_tokens: int | None = None) -> None:
        call = messages.StartReserved(self._next_call(), request_id, num_cached_tokens)
        self._live[request_id] = self._reserved.pop(request_id, 1)
        await self._call(call, None)

    async def end_fetch(self, sequence_id: str) -> None:
        await self._call(messages.EndFetch(self._next_call(always=True), sequence_id), None)

    def tell_load_rate(self, bytes_per_s: float) -> None:
        if self._ended is None:
            self._send(messages.LoadRate(bytes_per_s))

    async def release(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._reserved.pop(request_id, None)
        await self._call(messages.Release(self._next_call(always=True), request_id), None)

    async def pin(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, int]:
        return await self._call(messages.Pin(self._next_call(), list(hashes)), dict[bytes, int])

    async def unpin(self, block_ids: Iterable[int]) -> None:
        await self._call(messages.Unpin(self._next_call(always=True), list(block_ids)), None)

    async def reset_prefix_cache(self) -> int:
        return await self._call(messages.ResetPrefixCache(self._next_call()), int)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise Unavailable(self._ended, retry_after_s=1.0)

    def _next_call(self, always: bool = False) -> int:
        self._check_open()
        if len(self._calls) >= MAX_CALLS and not always:
            raise Overloaded(f"{len(self._calls)} calls wait for the engine, the limit is {MAX_CALLS}",
                             retry_after_s=1.0)
        self._num_calls += 1
        return self._num_calls

    async def _call(self, call: messages.Call, kind: type[T] | None) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = (future, kind)
        self._send(call)
        return await future

    def _send(self, command: messages.Command) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(command)

    def _flush(self) -> None:
        assert self._writer is not None
        commands, self._outbox = self._outbox, []
        self._writer.write(messages.frame(commands))

    async def _wait_ready(self) -> None:
        read = 0
        while True:
            try:
                async with asyncio.timeout(STALL_S):
                    message = await self._next_message()
            except TimeoutError:
                raise InternalError(f"the engine process was silent for {STALL_S:g} s while it started") from None
            except (asyncio.IncompleteReadError, ConnectionError):
                raise InternalError(f"the engine process ended while it started: {await self._exit_text()}") from None
            if isinstance(message, messages.Failed):
                raise message.error
            if isinstance(message, messages.Ready):
                self._facts, self._stats = message.facts, message.stats
                return
            assert isinstance(message, messages.Loading)
            if message.num_bytes != read:
                read = message.num_bytes
                log.info("loading", read_bytes=read, of_bytes=message.num_bytes_total)

    async def _next_message(self) -> messages.Message:
        assert self._reader is not None
        (size,) = messages.LENGTH.unpack(await self._reader.readexactly(messages.LENGTH.size))
        return messages.message_decoder.decode(await self._reader.readexactly(size))

    async def _read(self) -> None:
        why = "it ended the stream"
        try:
            while True:
                message = await self._next_message()
                assert isinstance(message, messages.Turn)
                self._take(message)
                if message.fatal is not None:
                    why = message.fatal
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            if self._ended is None:
                why = f"the engine process ended: {await self._exit_text()}"
        except Exception as error:
            log.exception("engine_turn_failed")
            why = f"the engine's turn could not be taken in: {error!r}"
        if self._ended is None:
            log.error("engine_lost", why=why, live=len(self._live))
            self._lose(why, WorkerLost(why))
            self._listener.on_failed(why)

    def _take(self, turn: messages.Turn) -> None:
        self._stats = turn.stats
        for answer in turn.answers:
            self._answer(answer)
        if turn.outputs:
            for output in turn.outputs:
                if output.finish_reason is not None:
                    self._note_end(output)
            self._listener.on_outputs(turn.outputs)
        if turn.events:
            self._listener.on_kv_events(messages.events_from_wire(turn.events))
        if turn.fetches:
            self._listener.on_fetches(turn.fetches)

    def _note_end(self, output: RequestOutput) -> None:
        left = self._live.pop(output.request_id, 1) - 1
        if left and output.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            self._live[output.request_id] = left

    def _answer(self, answer: messages.Answer) -> None:
        future, kind = self._calls.pop(answer.call_id)
        if future.done():
            return  # whoever asked has gone
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(msgspec.convert(answer.value, kind) if kind is not None else None)

    def _lose(self, why: str, error: ShoalError) -> None:
        """Answer all that waits."""
        self._ended = why
        live, self._live = self._live, {}
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if not future.done():
                future.set_exception(Unavailable(why, retry_after_s=1.0))
        if live:
            self._listener.on_outputs([
                RequestOutput(request_id, finish_reason=FinishReason.ERROR, error=error) for request_id in live])

    async def _exit_text(self) -> str:
        assert self._process is not None
        try:
            code = await asyncio.to_thread(self._process.wait, EXIT_S)
        except subprocess.TimeoutExpired:
            return "its stream is closed, but it still runs"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    async def _end_process(self) -> None:
        """The end of the stream tells it; one that does not listen is killed."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, EXIT_S)
