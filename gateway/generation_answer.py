"""Answers chat and completions: reads and validates a body, runs the pipeline, writes a body or a stream.

Life of one call: body read → slot taken → its orders running (the client's leaving, the deadline and the gateway's own
end interrupt them at once) → answered. A stream's status and headers go out only when its first event is known, so
that a refusal keeps its real status; from then on a failure is an error event. Every stream has exactly one ending.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common import logs, trace
from common.errors import Cancelled, InternalError, ShoalError
from common.generation import ModelFacts
from common.tokenized import TokenText
from gateway import chat_answer, completion_answer
from gateway.admission import Admission
from gateway.batch import run_all
from gateway.chat_answer import ChatBody, ChatChunks, ChatStyle, OpenParser
from gateway.chat_request import ChatRequest
from gateway.completion_answer import CompletionBody, CompletionChunks
from gateway.completion_request import CompletionRequest
from gateway.config import GatewayConfig
from gateway.errors import FAULT_TEXT, envelope
from gateway.field_types import MAX_KEY_CHARS
from gateway.interruption import Interruptible, deadline, interrupted_on_disconnect
from gateway.model_formats import ModelFormats
from gateway.observation import Observation, observation
from gateway.order import Ending, Order, Piece
from gateway.output_parsers import Formats, open_parser
from gateway.pipeline import Pipeline
from gateway.request_body import BodyReader, parse
from gateway.responses import BodyWriter, ChunkWriter, Envelope, Kind
from gateway.sse import EventStream
from gateway.tenants.tenant import caller_of
from gateway.token_texts import NO_TEXTS, TokenTexts, is_long

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
    bodies: BodyReader
    config: GatewayConfig
    formats: ModelFormats
    token_texts: TokenTexts
    open_parser: OpenParser = open_parser

    async def serve(self, kind: Kind, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `ShoalError` only while no byte has been sent."""
        seen = observation(scope)
        request = Request(scope, receive)
        raw = await self.bodies.read(request)
        with self.admission.slot() as work:
            with trace.span("gateway.parse", start_ns=trace.current().start_ns):
                body = parse(_BODIES[kind], raw)
                model = self.pipeline.find_model(body.model)
                caller = caller_of(scope)
                caller.check_model(model.name)
                seen.model, seen.streams = model.name, body.streams
                orders = [caller.signed(order) for order in await self._orders(body, model, request, work)]
                seen.order, seen.request_id = orders[0], orders[0].request_id
            call = _Call(self, orders, seen, work, receive, read_timeout_s(request))
            self.admission.widen(work, call.num_choices)
            if body.streams:
                await call.stream(send, self._chunks(kind, orders[0], body))
                return
            payload = await call.whole(self._body(kind, orders[0]))
        await Response(payload, media_type="application/json")(scope, receive, send)

    async def _orders(
        self, body: ChatRequest | CompletionRequest, model: ModelFacts, request: Request, work: Interruptible
    ) -> list[Order]:
        if isinstance(body, ChatRequest):
            return body.orders(model, await self._formats(model.name, request, work), affinity_key(request))
        return body.orders(model, affinity_key(request))

    async def _formats(self, model: str, request: Request, work: Interruptible) -> Formats:
        known = self.formats.known(model)
        if known is not None:
            return known
        allowed_s = min(self.config.request_timeout_s, read_timeout_s(request))
        at = asyncio.get_running_loop().time() + allowed_s
        async with work, interrupted_on_disconnect(work, request.receive), deadline(at, allowed_s):
            return await self.formats.of(model)

    def _chunks(self, kind: Kind, order: Order, body: ChatRequest | CompletionRequest) -> ChunkWriter:
        def envelope(id_prefix: str, object_: str) -> Envelope:
            return Envelope(id_prefix + order.request_id, object_, order.model.name,
                            include_usage=body.include_usage, usage_on_every_chunk=body.usage_on_every_chunk)

        if kind == "chat":
            return ChatChunks(self._style(order), envelope(chat_answer.ID_PREFIX, chat_answer.CHUNK_OBJECT))
        return CompletionChunks(order, envelope(completion_answer.ID_PREFIX, completion_answer.OBJECT))

    def _body(self, kind: Kind, order: Order) -> BodyWriter:
        if kind == "chat":
            return ChatBody(self._style(order), Envelope(
                chat_answer.ID_PREFIX + order.request_id, chat_answer.BODY_OBJECT, order.model.name))
        return CompletionBody(order, Envelope(
            completion_answer.ID_PREFIX + order.request_id, completion_answer.OBJECT, order.model.name))

    def _style(self, order: Order) -> ChatStyle:
        named = self.config.reasoning_field
        return ChatStyle(order, self.open_parser, ("reasoning", "reasoning_content") if named == "both" else (named,))


@dataclass(frozen=True, slots=True)
class _Call:
    desk: GenerationDesk
    orders: list[Order]
    seen: Observation
    work: Interruptible
    receive: Receive
    read_timeout_s: float  # the client gives up after this long without a byte; infinite when it did not say

    @property
    def num_choices(self) -> int:
        return sum(order.n for order in self.orders)

    async def whole(self, body: BodyWriter) -> bytes:
        num_open = self.num_choices
        async with self._running() as (events, _limit):
            async for event in events:
                self.seen.used = event.usage
                if isinstance(event, Piece):
                    texts = await self._texts(event)
                    if is_long(event):
                        await asyncio.to_thread(body.add, event, texts)
                    else:
                        body.add(event, texts)
                    continue
                body.finish(event)
                self.seen.finished(event.finish_reason, event.usage)
                num_open -= 1
                if not num_open:
                    return body.body(event)
        raise InternalError("the pipeline ended without an ending")

    async def stream(self, send: Send, chunks: ChunkWriter) -> None:
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

    async def _write_events(self, stream: EventStream, chunks: ChunkWriter) -> bytes:
        """Write all but the last event, and return that."""
        num_open = self.num_choices
        async with self._running() as (events, limit):
            async for event in events:
                self.seen.used = event.usage
                if isinstance(event, Ending):
                    finish = chunks.finish(event)
                    self.seen.finished(event.finish_reason, event.usage)
                    num_open -= 1
                    if not num_open:
                        return finish + chunks.done(event)
                    await stream.write(finish)
                    continue
                if not stream.is_open:
                    limit.reschedule(self._whole_deadline())
                    stream.open()
                texts = await self._texts(event) if event.logprobs or event.prompt_logprobs else NO_TEXTS
                if event.prompt_token_ids:  # the first of its choice
                    await stream.write(chunks.begin(event))  # may be nothing
                if chunk := (await asyncio.to_thread(chunks.content, event, texts) if is_long(event)
                             else chunks.content(event, texts)):
                    await stream.write(chunk)
                    if event.text:
                        self.seen.content(event.usage, event.choice)
        raise InternalError("the pipeline ended without an ending")

    async def _texts(self, piece: Piece) -> Mapping[int, TokenText]:
        if not (piece.logprobs or piece.prompt_logprobs):
            return NO_TEXTS
        return await self.desk.token_texts.of(self.orders[0].model.name, piece)

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
        """The events of all orders, interruptible. The read timeout bounds the wait for the first byte."""
        now = asyncio.get_running_loop().time()
        allowed_s = min(self.desk.config.request_timeout_s, self.read_timeout_s)
        end = now + (self.desk.config.request_timeout_s if self.seen.streams else allowed_s)
        async with (
            self.work, interrupted_on_disconnect(self.work, self.receive),
            deadline(now + allowed_s, allowed_s) as limit,
            aclosing(run_all(self.desk.pipeline, self.orders, end, self.desk.config.prompts_at_once,
                             self.seen.prompts_placed)) as events,
        ):
            yield events, limit


def read_timeout_s(request: Request) -> float:
    """`x-stainless-read-timeout` of the OpenAI SDKs in seconds; infinite when absent or no positive number."""
    try:
        given = float(request.headers.get("x-stainless-read-timeout", "inf"))
    except ValueError:
        return math.inf
    return given if given > 0 else math.inf


def affinity_key(request: Request) -> str:
    """Of requests that belong together: `x-session-affinity` or `x-session-id`; empty when absent or too long."""
    given = request.headers.get("x-session-affinity") or request.headers.get("x-session-id") or ""
    return given if len(given) <= MAX_KEY_CHARS else ""
