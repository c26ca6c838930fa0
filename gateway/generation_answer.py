"""Answers chat and completions: reads and validates a body, runs the pipeline, writes a body or a stream.

Life of one call: slot taken → body read → running (the client's leaving, the deadline and the gateway's own end
interrupt it at once) → answered. A stream's status and headers go out only when its first event is known, so that a
refusal keeps its real status; from then on a failure is an error event. Every stream has exactly one ending.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common import logs, trace
from common.errors import Cancelled, InternalError, ShoalError
from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.errors import FAULT_TEXT, envelope
from gateway.interruption import Interruptible, deadline, interrupted_on_disconnect
from gateway.observation import Observation, observation
from gateway.order import Ending, Order, Piece
from gateway.pipeline import Pipeline
from gateway.request_body import parse, read_body
from gateway.responses import Chunks, Kind, whole_body
from gateway.schemas import ChatRequest, CompletionRequest
from gateway.sse import EventStream

log = logs.get(__name__)

_BODIES: dict[Kind, type[ChatRequest | CompletionRequest]] = {"chat": ChatRequest, "completion": CompletionRequest}


class GenerationAnswer(Response):
    """A response that is its own ASGI application: no framework between the pipeline and the socket."""

    def __init__(self, desk: GenerationDesk, kind: Kind) -> None:
        super().__init__()
        self._desk, self._kind = desk, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._desk.serve(self._kind, scope, receive, send)


@dataclass(frozen=True, slots=True)
class GenerationDesk:
    """What all calls share."""

    pipeline: Pipeline
    admission: Admission
    config: GatewayConfig

    async def serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `ShoalError` only while no byte has been sent."""
        seen = observation(scope)
        request = Request(scope, receive)
        with self.admission.slot() as work:
            with trace.span("gateway.parse", start_ns=trace.current().start_ns):
                body = parse(_BODIES[kind], await read_body(
                    request, self.config.max_body_bytes, self.config.body_timeout_s))
                model = self.pipeline.find_model(body.model)
                seen.model, seen.streams = model.name, body.streams
                seen.order = order = body.order(model)
                seen.request_id = order.request_id
            call = _Call(self, order, seen, work, receive, read_timeout_s(request))
            if body.streams:
                await call.stream(send, Chunks(
                    kind, order.request_id, model.name, include_usage=body.include_usage,
                    usage_on_every_chunk=body.usage_on_every_chunk, return_token_ids=order.return_token_ids))
                return
            payload = await call.whole(kind)
        await Response(payload, media_type="application/json")(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Call:
    desk: GenerationDesk
    order: Order
    seen: Observation
    work: Interruptible
    receive: Receive
    read_timeout_s: float  # the client gives up after this long without a byte; infinite when it did not say

    async def whole(self, kind: Kind) -> bytes:
        texts: list[str] = []
        prompt_ids, output_ids = list[int](), list[int]()
        async with self._running() as (events, _limit):
            async for event in events:
                if isinstance(event, Piece):
                    texts.append(event.text)
                    prompt_ids += event.prompt_token_ids
                    output_ids += event.token_ids
                    continue
                self.seen.finished(event.finish_reason, event.usage)
                return whole_body(kind, self.order.request_id, self.order.model.name, "".join(texts), event,
                                  (prompt_ids, output_ids) if self.order.return_token_ids else None)
        raise InternalError("the pipeline ended without an ending")

    async def stream(self, send: Send, chunks: Chunks) -> None:
        config = self.desk.config
        stream = EventStream(
            send, ping_s=config.ping_s, buffer_bytes=config.stream_buffer_bytes,
            flush_timeout_s=config.flush_timeout_s)
        try:
            last = await self._write_events(stream, chunks)
            await stream.end(last)  # no longer interruptible: once all is sent, the server reports a disconnect
        except Cancelled as error:
            self.seen.failed(error)
        except Exception as fault:
            if not stream.is_open:
                raise
            await stream.end(b"data: " + envelope(self._told(fault)) + b"\n\n")
        finally:
            await stream.close()

    async def _write_events(self, stream: EventStream, chunks: Chunks) -> bytes:
        """Write all but the last event, and return that."""
        async with self._running() as (events, limit):
            async for event in events:
                if isinstance(event, Ending):
                    self.seen.finished(event.finish_reason, event.usage)
                    return chunks.end(event)
                if not stream.is_open:
                    limit.reschedule(self._whole_deadline())
                    stream.open()
                    await stream.write(chunks.begin(event))  # may be nothing
                if chunk := chunks.content(event):
                    await stream.write(chunk)
                    if event.text:
                        self.seen.content(event.usage)
        raise InternalError("the pipeline ended without an ending")

    def _told(self, fault: Exception) -> ShoalError:
        """What the client is told of a fault, which is recorded."""
        if not isinstance(fault, ShoalError):
            log.error("stream_fault", exc_info=fault)
            fault = InternalError(FAULT_TEXT)
        self.seen.failed(fault)
        return fault

    def _whole_deadline(self) -> float:
        return asyncio.get_running_loop().time() + self.desk.config.request_timeout_s

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[AsyncIterator[Piece | Ending], asyncio.Timeout]]:
        """The pipeline's events, interruptible. The read timeout bounds the wait for the first byte."""
        now = asyncio.get_running_loop().time()
        allowed_s = min(self.desk.config.request_timeout_s, self.read_timeout_s)
        end = now + (self.desk.config.request_timeout_s if self.seen.streams else allowed_s)
        async with (
            self.work, interrupted_on_disconnect(self.work, self.receive),
            deadline(now + allowed_s, allowed_s) as limit,
            aclosing(self.desk.pipeline.run(self.order, end)) as events,
        ):
            yield events, limit


def read_timeout_s(request: Request) -> float:
    """`x-stainless-read-timeout` of the OpenAI SDKs in seconds; infinite when absent or no positive number."""
    try:
        given = float(request.headers.get("x-stainless-read-timeout", "inf"))
    except ValueError:
        return math.inf
    return given if given > 0 else math.inf
