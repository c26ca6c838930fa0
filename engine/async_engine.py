"""An engine as asyncio code uses it: calls are awaited, outputs and KV events arrive in the event loop.

States: new → running (`start`) → stopped. What the engine's thread brings is handed over in order; when handing
over fails the engine counts as failed, because a delta that is lost would be a stream that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from common import logs
from common.kv_event import KvEvent
from engine.core import EngineCore
from engine.loop import EngineLoop
from engine.outputs import EngineStats, RequestOutput
from engine.request import EngineRequest

log = logs.get(__name__)
T = TypeVar("T")


class EngineListener(Protocol):
    """Who is told; all calls come in the event loop, in the order of the steps."""

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None: ...

    def on_kv_events(self, events: Sequence[KvEvent]) -> None: ...

    def on_failed(self, why: str) -> None:
        """The engine cannot go on; every live request has been answered."""


class AsyncEngine:
    """Owns an `EngineLoop`. `start` it inside the event loop that its listener lives in."""

    def __init__(self, core: EngineCore, listener: EngineListener) -> None:
        self.core = core
        self._listener = listener
        self._engine = EngineLoop(core, self._on_step, self._on_fatal, after_turn=self._after_turn)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

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
        """Raises a `ShoalError` for a refusal known at once; a later one is the request's only output."""
        self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    async def call(self, run: Callable[[EngineCore], T], *, always: bool = False) -> T:
        """Run between two steps, in the engine's thread; raises what it raises. Not undone by a cancellation.

        `always`: also when many calls wait, for what gives blocks back.
        """
        return await asyncio.wrap_future(self._engine.call(run, always=always))

    def _on_step(self, outputs: list[RequestOutput]) -> None:
        self._hand_over(self._listener.on_outputs, outputs)

    def _after_turn(self, core: EngineCore) -> None:
        events = core.take_kv_events()
        if events:
            self._hand_over(self._listener.on_kv_events, events)

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
