"""What a worker and its engine process say to each other, as msgpack with a length before it.

    worker ── Start ──▶ engine          engine ── Loading … ── Ready ──▶ worker, or Failed
    worker ── list of commands ──▶ engine          engine ── Turn ──▶ worker, one for each turn of its loop
    worker ── Stop ──▶ engine          engine ── a last Turn ──▶ worker, then the end of the stream

Both ends are the same version of the same program, on one machine.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from common.block_hash import BlockHash
from common.errors import InvalidRequest, ShoalError, from_wire
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from engine.engine_port import EngineFacts, Fetch
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest

LENGTH = struct.Struct("<I")  # of the message that follows


class Start(msgspec.Struct, tag=True):
    config: dict[str, Any]  # fields of WorkerConfig
    model: str
    hash_key: bytes
    log: tuple[str, str, str, str]  # service, service id, level, format


class Submit(msgspec.Struct, tag=True):
    """`request` is `packed`: one that cannot be read is refused alone, not with all commands of its message."""

    request_id: str
    request: msgspec.Raw


class Abort(msgspec.Struct, tag=True):
    request_id: str


class Reserve(msgspec.Struct, tag=True):
    call_id: int
    request: msgspec.Raw  # packed


class Land(msgspec.Struct, tag=True):
    call_id: int
    request_id: str
    num_tokens: int


class StartReserved(msgspec.Struct, tag=True):
    call_id: int
    request_id: str
    num_cached_tokens: int | None


class Release(msgspec.Struct, tag=True):
    call_id: int
    request_id: str


class Pin(msgspec.Struct, tag=True):
    call_id: int
    hashes: list[bytes]


class Unpin(msgspec.Struct, tag=True):
    call_id: int
    block_ids: list[int]


class ResetPrefixCache(msgspec.Struct, tag=True):
    call_id: int


class EndFetch(msgspec.Struct, tag=True):
    call_id: int
    sequence_id: str


class LoadRate(msgspec.Struct, tag=True):
    bytes_per_s: float


class Stop(msgspec.Struct, tag=True):
    """End what lives with an error, then end."""


Call = Reserve | Land | StartReserved | EndFetch | Release | Pin | Unpin | ResetPrefixCache
Command = Submit | Abort | Call | LoadRate | Stop


class Loading(msgspec.Struct, tag=True):
    """A sign of life while the model is read."""

    num_bytes: int
    num_bytes_total: int


class Ready(msgspec.Struct, tag=True):
    facts: EngineFacts
    stats: EngineStats


class Failed(msgspec.Struct, tag=True):
    """The engine could not start."""

    error: ShoalError


class Answer(msgspec.Struct):
    """The result of one call, or why there is none."""

    call_id: int
    value: Any = None
    error: ShoalError | None = None


WireEvents = list[tuple[list[BlockHash], BlockHash | None] | None]


class Turn(msgspec.Struct, tag=True):
    """`events` are KV events in order: (hashes, parent) stored, (hashes, None) removed, None cleared."""

    outputs: list[RequestOutput]
    events: WireEvents
    answers: list[Answer]
    fetches: list[Fetch]
    stats: EngineStats
    fatal: str | None = None  # why there will be no other


Message = Loading | Ready | Failed | Turn


def events_to_wire(events: list[KvEvent]) -> WireEvents:
    wired: WireEvents = []
    for event in events:
        match event:
            case BlockStored():
                wired.append((list(event.hashes), event.parent))
            case BlockRemoved():
                wired.append((list(event.hashes), None))
            case BlocksCleared():
                wired.append(None)
    return wired


def events_from_wire(wired: WireEvents) -> list[KvEvent]:
    events: list[KvEvent] = []
    for item in wired:
        if item is None:
            events.append(BlocksCleared())
        else:
            hashes, parent = item
            events.append(BlockRemoved(tuple(hashes)) if parent is None else BlockStored(tuple(hashes), parent))
    return events


def packed(request: EngineRequest) -> msgspec.Raw:
    """Raises `InvalidRequest` for a value that this wire cannot carry."""
    try:
        return msgspec.Raw(_ENCODER.encode(request))
    except (TypeError, ValueError, ArithmeticError, NotImplementedError) as error:
        raise InvalidRequest(f"the request cannot be sent to its engine: {error}") from error


def unpacked(request: msgspec.Raw) -> EngineRequest:
    """Raises `InvalidRequest` that names the field of a wrong type."""
    try:
        return _request_decoder.decode(request)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the request cannot be read: {error}") from error


def frame(message: Any) -> bytes:
    """One message, or a list of commands, with its length before it."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def _encode_error(value: Any) -> Any:
    if isinstance(value, ShoalError):
        return value.wire()
    raise NotImplementedError(f"{type(value).__name__} does not go on this wire")


def _decode_error(kind: type, value: Any) -> Any:
    if issubclass(kind, ShoalError):
        return from_wire(value)
    raise NotImplementedError(f"{kind.__name__} does not come on this wire")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_error)
start_decoder = msgspec.msgpack.Decoder(Start)
_request_decoder = msgspec.msgpack.Decoder(EngineRequest)
commands_decoder = msgspec.msgpack.Decoder(list[Command])
message_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_decode_error)
