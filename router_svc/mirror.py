"""The index outside this process, as the router writes to it: another router, or this one's next life, loads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.block_hash import BlockHash
from common.kv_event import KvEvent
from common.service_record import ServiceRecord


@dataclass(frozen=True, slots=True)
class MirroredWorker:
    """All that was mirrored of one worker: what it held after its batch `seq`."""

    worker_id: str
    incarnation: str
    seq: int
    hashes: tuple[BlockHash, ...]


class Mirror(Protocol):
    """None of the calls waits or fails: they note what is to be written. Routers may repeat each other."""

    def write(self, record: ServiceRecord, seq: int, events: Sequence[KvEvent]) -> None:
        """Batch `seq`, the one after the last."""

    def replace(self, record: ServiceRecord, seq: int) -> None:
        """What the index holds of the worker is all there is, as of `seq`."""

    def forget(self, record: ServiceRecord) -> None:
        """This life of the worker is over."""


class NoMirror:
    """For a router that keeps its index to itself."""

    def write(self, record: ServiceRecord, seq: int, events: Sequence[KvEvent]) -> None:
        pass

    def replace(self, record: ServiceRecord, seq: int) -> None:
        pass

    def forget(self, record: ServiceRecord) -> None:
        pass
