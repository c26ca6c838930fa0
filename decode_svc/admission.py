"""How a request's prompt KV comes to be on this worker, before the scheduler takes over.

States of an admission: asked → plain (nothing to fetch: the scheduler queues and computes it), or asked → reserved
(blocks granted) → loading from the store → receiving from a prefill worker → started. Each step that fails or is not
worth it is left out: whatever is missing at `started`, the scheduler computes. A cancelled admission waits for the
copy in hand, then gives its blocks back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from common import logs, trace
from common.errors import Overloaded, ShoalError
from common.generation import Generation
from common.placement import Placement
from decode_svc.request_meter import RequestMeter
from decode_svc.request_spans import RequestSpans
from engine.core import Reservation
from engine.engine_port import EnginePort, Fetch
from engine.kv_transfer.receiver import Receiver, Route
from engine.kv_transfer.store_loader import StoreLoader
from engine.request import EngineRequest

log = logs.get(__name__)


@dataclass(slots=True)
class AdmissionCounts:
    """How prompts were admitted. `num_no_room`: the cap on blocks that await KV was reached, so it went in plain."""

    num_plain: int = 0
    num_reserved: int = 0
    num_no_room: int = 0


class KvAdmission:
    """`find_route` says how to reach the prefill worker of a placement, or None when it is gone.

    `loader` is None where nothing cached may be used.
    """

    def __init__(
        self, engine: EnginePort, loader: StoreLoader | None, receiver: Receiver,
        find_route: Callable[[Placement], Route | None], meter: RequestMeter, spans: RequestSpans, *,
        block_size: int, timeout_s: float,
    ) -> None:
        self._engine, self._loader, self._receiver = engine, loader, receiver
        self._find_route, self._block_size, self._timeout_s = find_route, block_size, timeout_s
        self._meter, self._spans = meter, spans
        self.counts = AdmissionCounts()

    async def admit(self, generation: Generation, request: EngineRequest) -> None:
        """Return once the scheduler has the request. Raises the `ShoalError` that refuses it."""
        if generation.params.prompt_logprobs is not None and not generation.output_token_ids:
            self._plain(request)  # every prompt token is to be computed here
            return
        route = self._find_route(generation.placement) if generation.placement else None
        present = await self._loader.blocks_present(self._loadable(generation)) if self._loader is not None else 0
        if route is None and not present:
            self._plain(request)
            return
        try:
            with trace.span("kv.reserve"):
                reservation = await self._engine.reserve(request)
        except Overloaded:
            self.counts.num_no_room += 1
            self._plain(request)
            return
        except asyncio.CancelledError:  # the call is not undone: it may have been granted all the same
            await asyncio.shield(self._give_back(request.request_id))
            raise
        self.counts.num_reserved += 1
        await self._fill_and_start(generation, request, reservation, present, route)

    async def serve_fetch(self, fetch: Fetch) -> None:
        """A preempted sequence's KV comes back from the store. Asked for only where there is a loader."""
        assert self._loader is not None
        await self._loader.serve(fetch)

    def _plain(self, request: EngineRequest) -> None:
        self.counts.num_plain += 1
        self._spans.ready(request.request_id)
        self._engine.submit(request)

    async def _fill_and_start(
        self, generation: Generation, request: EngineRequest, reservation: Reservation, present: int,
        route: Route | None,
    ) -> None:
        started = False
        left_s = self._timeout_s if request.deadline is None else min(
            self._timeout_s, max(0.001, request.deadline - time.monotonic()))
        try:
            have = await self._load(generation, reservation, present)
            cached = progress = have
            wanted = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
            if route is not None and have < wanted:
                received = await self._receiver.receive(
                    route, request, reservation.block_ids, have, left_s)
                cached, progress = received.num_cached_tokens, received.num_tokens
            self._meter.brought(
                request.request_id, device=reservation.num_cached_tokens, store=have - reservation.num_cached_tokens,
                remote=progress - have)
            self._spans.ready(request.request_id)
            await self._engine.start_reserved(request.request_id, num_cached_tokens=cached)
            started = True
        finally:
            if not started:
                await asyncio.shield(self._give_back(request.request_id))

    async def _load(self, generation: Generation, reservation: Reservation, present: int) -> int:
        """Tokens there are after what the store had."""
        have = reservation.num_cached_tokens
        if self._loader is None or not self._loader.is_worth(present - have // self._block_size):
            return have
        loaded = await self._loader.load(
            generation.request_id, generation.block_hashes[:present], reservation.block_ids, have // self._block_size)
        return loaded * self._block_size

    def _loadable(self, generation: Generation) -> tuple[bytes, ...]:
        """The full blocks that leave at least one prompt token to compute."""
        return generation.block_hashes[: (len(generation.prompt_token_ids) - 1) // self._block_size]

    async def _give_back(self, request_id: str) -> None:
        try:
            await self._engine.release(request_id)
        except ShoalError:
            log.debug("nothing_to_release", request_id=request_id)  # the engine has ended, and its blocks with it
