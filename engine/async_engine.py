"""An engine in a thread of this process, as an `EnginePort`: for tests, benchmarks and small tools.

States: new → running (`start`) → stopped. What the engine's thread brings is handed over in order; when handing
over fails the engine counts as failed, because a delta that is lost would be a stream that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TypeVar

from common import logs
from common.block_hash import BlockHash
from engine.core import EngineCore, Reservation
from engine.engine_port import EngineFacts, EngineListener
from engine.grammar.grammar_desk import CompilesGrammars
from engine.loop import EngineLoop
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest
from engine.store_swap import StoreSwap

log = logs.get(__name__)
T = TypeVar("T")


class AsyncEngine:
    """Owns an `EngineLoop`. `start` it inside the event loop that its listener lives in."""

    def __init__(
        self, core: EngineCore, listener: EngineListener, facts: EngineFacts,
        grammar_compiler: CompilesGrammars | None = None,
    ) -> None:
        self.core = core
        self.facts = facts
        self._listener = listener
        self._engine = EngineLoop(
            core, self._on_step, self._on_fatal, after_turn=self._after_turn, grammar_compiler=grammar_compiler)
        self._swap = StoreSwap(core.block_bytes)
        core.use_swap(self._swap)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def block_view(self, block_id: int) -> memoryview:
        return self.core.block_view(block_id)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Answer what is left with an error and join the engine's thread, which may be longer in a step than that."""
        try:
            await asyncio.to_thread(self._engine.stop, timeout_s)
        except TimeoutError:
            log.error("engine_does_not_stop", limit_s=timeout_s)
        await asyncio.sleep(0)  # what was handed over last is delivered

    def submit(self, request: EngineRequest) -> None:
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def call(self, run: Callable[[EngineCore], T], *, always: bool = False) -> T:
        """Run between two steps, in the engine's thread; raises what it raises. `always`: also when many calls wait."""
        return await _uncancelled(self._engine.call(run, always=always))

    async def reserve(self, request: EngineRequest) -> Reservation:
        return await _uncancelled(self._engine.reserve(request))

    async def land(self, request_id: str, num_tokens: int) -> None:
        await self.call(lambda core: core.land(request_id, num_tokens))

    async def start_reserved(self, request_id: str, num_cached_tokens: int | None = None) -> None:
        await self.call(lambda core: core.start(request_id, num_cached_tokens))

    async def end_fetch(self, sequence_id: str) -> None:
        await self.call(lambda core: core.start(sequence_id), always=True)

    def tell_load_rate(self, bytes_per_s: float) -> None:
        self._swap.bytes_per_s = bytes_per_s

    async def release(self, request_id: str) -> None:
        await _uncancelled(self._engine.release(request_id))

    async def pin(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, int]:
        return await self.call(lambda core: core.pin(hashes))

    async def unpin(self, block_ids: Iterable[int]) -> None:
        await self.call(lambda core: core.unpin(block_ids), always=True)

    async def reset_prefix_cache(self) -> int:
        return await self.call(EngineCore.reset_prefix_cache)

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        self._hand_over(self._listener.on_outputs, outputs)

    def _after_turn(self, core: EngineCore) -> None:
        events = core.take_kv_events()
        if events:
            self._hand_over(self._listener.on_kv_events, events)
        fetches = self._swap.take_fetches()
        if fetches:
            self._hand_over(self._listener.on_fetches, fetches)

    def _on_fatal(self, error: Exception) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._listener.on_failed, f"the engine failed: {error}")

    def _hand_over(self, deliver: Callable[[list[T]], None], items: list[T]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, deliver, items)

    def _deliver(self, deliver: Callable[[list[T]], None], items: list[T]) -> None:
        try:
            deliver(items)
        except Exception as error:
            log.exception("delivery_failed")
            self._listener.on_failed(f"outputs could not be delivered: {error}")


async def _uncancelled(command: Future[T]) -> T:
    """A cancellation ends the waiting, not the command: the engine may have begun it."""
    return await asyncio.shield(asyncio.wrap_future(command))
