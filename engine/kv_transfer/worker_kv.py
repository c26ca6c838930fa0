"""All KV of one worker that comes from or goes to elsewhere: the store on both sides of its engine."""

from __future__ import annotations

from collections.abc import Sequence

from common.kv_event import KvEvent
from common.service_record import Fingerprint
from engine.engine_port import EnginePort
from engine.kv_transfer.store_loader import StoreLoader
from engine.kv_transfer.store_port import StorePort
from engine.kv_transfer.write_back import WriteBack


class WorkerKv:
    """Joins loader and write-back of an engine. `writes` says whether cached blocks go to the store."""

    def __init__(self, engine: EnginePort, store: StorePort, fingerprint: Fingerprint, *, writes: bool) -> None:
        self.loader = StoreLoader(engine, store, fingerprint)
        self.write_back = WriteBack(engine, store, fingerprint, self.loader.origins) if writes else None

    def start(self) -> None:
        if self.write_back is not None:
            self.write_back.start()

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        if self.write_back is not None:
            self.write_back.on_kv_events(events)

    async def stop(self, flush_s: float) -> None:
        if self.write_back is not None:
            await self.write_back.stop(flush_s)
