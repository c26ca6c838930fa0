"""An engine as a worker's asyncio code uses it, wherever it runs: in a thread of this process or in its own process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.block_hash import BlockHash
from common.kv_event import KvEvent
from common.service_record import Fingerprint
from engine.core import Reservation
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`fingerprint` says what its KV blocks are, `capacity` what it can take.

    `has_host_blocks`: `block_view` works; the KV of a GPU is not in memory that a host can read in place.
    """

    fingerprint: Fingerprint
    capacity: dict[str, int]
    block_bytes: int
    has_host_blocks: bool = True


@dataclass(frozen=True, slots=True)
class Fetch:
    """A preempted sequence wants blocks `num_present ..` of its chain back, into `block_ids`.

    Whoever serves it copies what it finds, tells `land`, and ends it with `end_fetch`, whatever happens.
    """

    sequence_id: str
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[int, ...]
    num_present: int


class EngineListener(Protocol):
    """Who is told; all calls come in the event loop, in the order of the steps."""

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None: ...

    def on_kv_events(self, events: Sequence[KvEvent]) -> None: ...

    def on_fetches(self, fetches: Sequence[Fetch]) -> None:
        """Comes only after `EnginePort.tell_load_rate`."""

    def on_failed(self, why: str) -> None:
        """The engine cannot go on; every live request has been answered."""


class EnginePort(Protocol):
    """Awaited methods run between two steps, as those of `EngineCore` do; none is undone by a cancellation.

    They raise what the core raises, `Overloaded` when too many wait, and `Unavailable` once the engine has ended.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def stats(self) -> EngineStats:
        """As of the last turn; costs nothing. Not to be changed."""

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of a block in place, writable, from any thread: see `Runner.block_view`."""

    def submit(self, request: EngineRequest) -> None:
        """Raises a `ShoalError` for a refusal known at once; a later one is the request's only output."""

    def abort(self, request_id: str) -> None:
        """The request's last output has reason `abort`, unless it ended before. Idempotent."""

    async def reserve(self, request: EngineRequest) -> Reservation: ...

    async def land(self, request_id: str, num_tokens: int) -> None: ...

    async def start_reserved(self, request_id: str, num_cached_tokens: int | None = None) -> None: ...

    async def end_fetch(self, sequence_id: str) -> None:
        """The sequence goes on from what has landed; one that ended meanwhile gives its blocks back."""

    def tell_load_rate(self, bytes_per_s: float) -> None:
        """How fast `Fetch`es would be served; from the first time on there may be some."""

    async def release(self, request_id: str) -> None:
        """Accepted however many calls wait, and also while a `reserve` of this id does."""

    async def pin(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, int]: ...

    async def unpin(self, block_ids: Iterable[int]) -> None:
        """Accepted however many calls wait."""

    async def reset_prefix_cache(self) -> int: ...

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Answer what is left with an error and end the engine."""
