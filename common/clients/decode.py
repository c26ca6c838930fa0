"""Decode workers as the gateway sees them: one long stream per worker, many requests on it.

States of a `_Link`: connecting → connected → broken → connecting (again while the worker is listed) → closed. When a
connected link breaks, each request on it ends with `WorkerLost`; the worker in turn aborts what came over it.
Requests on a link: submitted → (deltas)* → finished, or aborted by closing the iterator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc.aio

from common import logs, rpc
from common.bus import Bus
from common.clients.channels import ChannelPool
from common.clients.delta_inbox import DeltaInbox
from common.clients.generate import delta_from_proto, generation_to_proto
from common.clients.worker import LOAD_SUBJECT
from common.directory import Directory
from common.errors import Cancelled, InvalidRequest, Overloaded, ShoalError, Unavailable, WorkerLost
from common.generation import FinishReason, Generation, ModelFacts, TokenDelta, WorkerView
from common.service_record import ServiceRecord
from proto import decode_pb2, decode_pb2_grpc, events_pb2

log = logs.get(__name__)

LOAD_STALE_S = 5.0  # an older report says nothing
CONNECT_TIMEOUT_S = 5.0
STALL_S = 3.0  # a worker sends something every second; silent for longer it is given up
_STALL_TICKS = 6  # that silence is counted in
RECONNECT_WAIT_S = 0.3
MAX_QUEUED_COMMANDS = 4096
_ENDS_ALL = (FinishReason.ABORT, FinishReason.ERROR)  # of whichever choice


class DecodeClient:
    """`common.generation.DecodePort` over gRPC. `start` before use, `stop` once."""

    def __init__(self, directory: Directory, bus: Bus, channels: ChannelPool | None = None) -> None:
        self._directory, self._bus, self._channels = directory, bus, channels or ChannelPool()
        self._links: dict[str, _Link] = {}
        self._loads: dict[str, tuple[float, events_pb2.WorkerLoad]] = {}
        self._models: dict[str, ModelFacts] = {}
        self._connected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._bus.subscribe(f"{LOAD_SUBJECT}.*", self._on_load)
        self._follow()
        self._task = asyncio.create_task(self._keep_following())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for link in list(self._links.values()):
            await link.close()
        self._links.clear()

    def models(self) -> list[ModelFacts]:
        return sorted(self._models.values(), key=lambda m: m.name)

    def workers(self, model: str) -> list[WorkerView]:
        return [self._view(link, model) for link in self._links.values()
                if link.connected and link.record.state == "ready" and model in link.record.models]

    async def wait_for_workers(self, model: str, timeout_s: float) -> list[WorkerView]:
        deadline = time.monotonic() + timeout_s
        while not (found := self.workers(model)):
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, 0.5)):
                    await self._connected.wait()
        return found

    async def generate(self, worker_id: str, generation: Generation) -> AsyncIterator[TokenDelta]:
        link = self._links.get(worker_id)
        if link is None or not link.connected:
            raise Unavailable(f"decode worker {worker_id} is not connected", retry_after_s=1.0)
        inbox = link.submit(generation)
        num_open = generation.params.n
        try:
            while num_open:
                for delta in await inbox.take():
                    if isinstance(delta, ShoalError):
                        num_open = 0
                        raise delta
                    if delta.finish_reason is not None:
                        num_open = 0 if delta.finish_reason in _ENDS_ALL else num_open - 1
                    if delta.error is not None:
                        raise _meant(delta.error)
                    yield delta
        finally:
            link.forget(generation.request_id, abort=num_open > 0)

    def _view(self, link: _Link, model: str) -> WorkerView:
        record = link.record
        assert record.fingerprint is not None
        at, load = self._loads.get(record.service_id, (0.0, events_pb2.WorkerLoad()))
        if time.monotonic() - at > LOAD_STALE_S or load.incarnation != record.incarnation:
            load = events_pb2.WorkerLoad(num_free_blocks=record.capacity.get("num_blocks", 0))
        return WorkerView(
            worker_id=record.service_id, model=model, fingerprint=record.fingerprint,
            max_model_len=record.capacity.get("max_model_len", 0), max_num_seqs=record.capacity.get("max_num_seqs", 1),
            num_running=load.num_running, num_waiting=load.num_waiting,
            num_blocks=record.capacity.get("num_blocks", 0), num_free_blocks=load.num_free_blocks,
            num_in_flight=link.num_in_flight, incarnation=record.incarnation, connection=link.num_connections)

    async def _on_load(self, _subject: str, payload: bytes) -> None:
        load = events_pb2.WorkerLoad.FromString(payload)
        if load.worker_id in self._links:  # bounded by the workers that are listed
            self._loads[load.worker_id] = (time.monotonic(), load)

    async def _keep_following(self) -> None:
        while True:
            await self._directory.changed(timeout_s=2.0)
            self._follow()

    def _follow(self) -> None:
        """Make the links match the directory: one per listed incarnation that has not been dropped."""
        listed = {r.service_id: r for r in self._directory.all("decode") if r.fingerprint is not None}
        for worker_id, link in list(self._links.items()):
            record = listed.get(worker_id)
            if record is None or record.incarnation != link.record.incarnation:
                del self._links[worker_id]
                self._loads.pop(worker_id, None)
                link.retire()
            else:
                link.record = record  # the state may have changed
        for worker_id, record in listed.items():
            if worker_id not in self._links:
                self._links[worker_id] = _Link(record, self._connected, self._channels.open(record.address))
            for model in record.models:
                self._models[model] = ModelFacts(
                    model, record.capacity.get("max_model_len", 0), int(record.started_at_unix_s))


_Commands = asyncio.Queue[decode_pb2.GenerateCommand | None]


class _Link:
    """One `Generate` stream to one incarnation of a worker, kept up until `close`."""

    def __init__(
        self, record: ServiceRecord, connected_event: asyncio.Event, channel: grpc.aio.Channel
    ) -> None:
        self.record = record
        self.connected = False
        self.num_connections = 0
        self.num_in_flight = 0  # choices: each takes a seat of the worker
        self._event = connected_event
        self._open: dict[str, DeltaInbox] = {}
        self._num_choices: dict[str, int] = {}  # of what is open
        self._heard = False  # since the last tick
        self._commands: _Commands = asyncio.Queue()  # of the attempt that is connected
        self._channel = channel
        self._failure = ""  # why the last attempt came to nothing
        self._task = asyncio.create_task(self._run())

    def submit(self, generation: Generation) -> DeltaInbox:
        if generation.request_id in self._open:
            raise InvalidRequest(f"request_id: {generation.request_id!r} is in use", param="request_id")
        inbox = DeltaInbox()
        if not self._send(decode_pb2.GenerateCommand(submit=generation_to_proto(generation))):
            raise Unavailable("the stream to the worker is congested", retry_after_s=1.0)
        self._open[generation.request_id] = inbox
        self._num_choices[generation.request_id] = generation.params.n
        self.num_in_flight += generation.params.n
        return inbox

    def forget(self, request_id: str, *, abort: bool) -> None:
        self.num_in_flight -= self._num_choices.pop(request_id, 0)
        if self._open.pop(request_id, None) is None or not (abort and self.connected):
            return
        command = decode_pb2.GenerateCommand(abort=decode_pb2.Abort(request_id=request_id, reason="caller left"))
        if not self._send(command):  # an unsent abort would leak blocks: break the stream, which aborts all
            log.error("link_congested", worker_id=self.record.service_id)
            self._task.cancel()
            self._task = asyncio.create_task(self._run())

    def retire(self) -> None:
        """The registry no longer lists this incarnation: let running requests end, then close."""
        self._retiring = asyncio.create_task(self._close_when_idle())

    async def close(self) -> None:
        self._task.cancel()
        self._fail_open("the gateway closed its stream to the worker")
        await self._channel.close()

    async def _close_when_idle(self) -> None:
        while self._open and self.connected:
            await asyncio.sleep(0.2)
        await self.close()

    async def _run(self) -> None:
        while True:
            why = "closed by the worker"
            try:
                await self._stream()
            except grpc.aio.AioRpcError as error:
                why = rpc.error_from_rpc(error).message
            except TimeoutError:
                why = "silent for too long"
            finally:
                was, self.connected = self.connected, False
                self._fail_open(f"decode worker {self.record.service_id} was lost")
            if was:
                log.warning("worker_lost", worker_id=self.record.service_id, why=why)
            elif not self._failure:  # once; it tries on, and the texts of failures differ
                log.warning("worker_not_connected", worker_id=self.record.service_id, why=why)
            self._failure = why
            await asyncio.sleep(RECONNECT_WAIT_S)

    async def _stream(self) -> None:
        # A call that has ended does not cancel its reader of commands, so each attempt has a queue of its own.
        commands: _Commands = asyncio.Queue(MAX_QUEUED_COMMANDS + 1)
        call = decode_pb2_grpc.DecodeStub(self._channel).Generate(_sending(commands))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await call.initial_metadata()
            self._commands, self.connected = commands, True
            self.num_connections += 1
            self._event.set()
            self._event.clear()
            async with asyncio.timeout(None) as stall:
                watch = asyncio.create_task(self._watch(stall))
                try:
                    await self._read(call)
                finally:
                    watch.cancel()
        finally:
            call.cancel()
            while not commands.empty():
                commands.get_nowait()
            commands.put_nowait(None)

    async def _watch(self, stall: asyncio.Timeout) -> None:
        """Ends the stream after `STALL_S` of silence, in ticks: a loop that stood still itself has counted one, and
        then reads what the worker sent meanwhile."""
        num_silent = 0
        while num_silent < _STALL_TICKS:
            self._heard = False
            await asyncio.sleep(STALL_S / _STALL_TICKS)
            num_silent = 0 if self._heard else num_silent + 1
        stall.reschedule(asyncio.get_running_loop().time())

    async def _read(self, call: Any) -> None:
        """Until the worker ends the stream."""
        while True:
            batch = await call.read()
            if batch is grpc.aio.EOF:
                return
            self._heard = True
            for delta in batch.deltas:
                inbox = self._open.get(delta.request_id)
                if inbox is None:  # aborted requests may still have a delta on the way
                    continue
                if not inbox.put(delta_from_proto(delta)):
                    self.forget(delta.request_id, abort=True)

    def _send(self, command: decode_pb2.GenerateCommand) -> bool:
        """False when the stream is congested."""
        if self._commands.qsize() >= MAX_QUEUED_COMMANDS:
            return False
        self._commands.put_nowait(command)
        return True

    def _fail_open(self, why: str) -> None:
        for inbox in self._open.values():
            inbox.put(WorkerLost(why, retry_after_s=1.0))
        self._open.clear()
        self._num_choices.clear()
        self.num_in_flight = 0


def _meant(error: ShoalError) -> ShoalError:
    """Of an answer of the worker's that is about our stream to it, not about the request."""
    if isinstance(error, Cancelled):
        return WorkerLost(error.message)
    if isinstance(error, InvalidRequest) and error.param == "request_id":  # ids are ours
        return Overloaded("the worker has not yet let go of the request, which came over a stream that broke",
                          retry_after_s=RECONNECT_WAIT_S)
    return error


async def _sending(commands: _Commands) -> AsyncIterator[decode_pb2.GenerateCommand]:
    while (command := await commands.get()) is not None:
        yield command
