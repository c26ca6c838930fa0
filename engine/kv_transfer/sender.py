"""The prefill side of a hand-off (states: see `common.hand_off`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import trace
from common.block_hash import BlockHash
from common.bucket_counts import BucketCounts
from common.errors import ShoalError
from common.hand_off import Done, Landed, PrefillEvent, PrefillOrder, Progress, Pusher
from common.metrics import TRANSFER_BUCKETS
from common.sampling_params import SamplingParams
from engine.core import Reservation
from engine.engine_port import EnginePort
from engine.kv_transfer.pinned_copy import PinnedCopies, wait_through
from engine.kv_transfer.store_loader import StoreLoader
from engine.outputs import RequestOutput
from engine.request import EngineRequest

PROGRESS_S = 0.5  # the longest silence towards the receiver
MAX_STEP_S = 15.0  # an engine that takes longer for a step is not to look alive
_MAX_PUSH_BLOCKS = 32  # of one chunk, so that the receiver's copies overlap ours
_UNUSED = SamplingParams(max_tokens=1)  # a prefill-only request samples nothing


@dataclass(slots=True)
class CopyCounts:
    num_bytes: int = 0
    seconds: BucketCounts = field(default_factory=lambda: BucketCounts(TRANSFER_BUCKETS))  # of each push


@dataclass(slots=True)
class SendCounts:
    num_transfers: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_tokens_computed: int = 0
    num_tokens_cached: int = 0
    copies: dict[str, CopyCounts] = field(default_factory=dict)  # by transport


class Sender:
    """Makes a prompt's KV and pushes blocks as the steps that filled them retire."""

    def __init__(
        self, engine: EnginePort, loader: StoreLoader | None, open_pusher: Callable[[PrefillOrder], Pusher],
        block_size: int,
    ) -> None:
        self._engine, self._loader, self._open_pusher = engine, loader, open_pusher
        self._block_size = block_size
        self._progress: dict[str, asyncio.Queue[RequestOutput]] = {}
        self.counts = SendCounts()

    @property
    def num_live(self) -> int:
        return len(self._progress)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            queue = self._progress.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)  # bounded by the steps of one prompt

    async def send(self, order: PrefillOrder) -> AsyncGenerator[PrefillEvent, None]:
        """Events up to `Done`. Raises `Overloaded` when the pool is full; closing it early aborts and frees."""
        request = EngineRequest(
            request_id=order.transfer_id, prompt_token_ids=order.token_ids, params=_UNUSED, adapter=order.adapter,
            cache_salt=order.cache_salt, block_hashes=order.block_hashes or None, prefill_only=True)
        self._progress[order.transfer_id] = asyncio.Queue()
        copies = PinnedCopies()
        pusher: Pusher | None = None
        preparing: asyncio.Future[tuple[Reservation, int]] | None = None
        try:
            pusher = self._open_pusher(order)
            preparing = asyncio.ensure_future(self._prepare(order, request))
            async for progress in _signs_of_life(preparing, 0):
                yield progress
            reservation, have = await preparing
            transfer = _Outgoing(
                self._engine, order, reservation.block_ids, pusher, copies, self._block_size,
                self.counts.copies.setdefault(order.ticket.transport, CopyCounts()))
            async for event in self._compute_and_push(order, transfer, have):
                yield event
            self.counts.num_transfers += 1
            self.counts.num_blocks += transfer.num_sent
            self.counts.num_bytes += transfer.num_bytes
        finally:
            await asyncio.shield(self._give_back(order.transfer_id, preparing, copies, pusher))

    async def _prepare(self, order: PrefillOrder, request: EngineRequest) -> tuple[Reservation, int]:
        """Reserve, take what the store has, and start; each call to the engine may wait for a long step."""
        reservation = await self._engine.reserve(request)
        have = await self._from_store(order, reservation)
        await self._engine.start_reserved(order.transfer_id, num_cached_tokens=have)
        return reservation, have

    async def _from_store(self, order: PrefillOrder, reservation: Reservation) -> int:
        """Progress in tokens after what the cache and the store had."""
        have = reservation.num_cached_tokens
        hashes: Sequence[BlockHash] = order.block_hashes[: (len(order.token_ids) - 1) // self._block_size]
        if self._loader is None or len(hashes) * self._block_size <= have:
            return have
        present = await self._loader.blocks_present(hashes)
        if not self._loader.is_worth(present - have // self._block_size):
            return have
        loaded = await self._loader.load(
            order.transfer_id, hashes[:present], reservation.block_ids, have // self._block_size)
        return loaded * self._block_size

    async def _compute_and_push(
        self, order: PrefillOrder, transfer: _Outgoing, have: int
    ) -> AsyncGenerator[PrefillEvent, None]:
        wanted = len(order.token_ids) - 1
        computed, num_chunks = have, 0
        stands = _Standstill(self._engine)
        while True:
            async for event in transfer.push_up_to(computed):
                yield event
            if computed >= wanted:
                break
            try:
                computed = await self._next_progress(order.transfer_id)
                num_chunks += 1
            except TimeoutError:
                if stands.seconds() < MAX_STEP_S:
                    yield Progress(computed)
        trace.current().put({
            "shoal.prefill.cached_tokens": have, "shoal.prefill.computed_tokens": wanted - have,
            "shoal.prefill.chunks": num_chunks, "shoal.kv.blocks": transfer.num_sent,
            "shoal.kv.bytes": transfer.num_bytes, "shoal.kv.transport": order.ticket.transport})
        self.counts.num_tokens_cached += have
        self.counts.num_tokens_computed += wanted - have
        yield Done(num_tokens_computed=wanted - have, num_cached_tokens=have, bytes_sent=transfer.num_bytes)

    async def _next_progress(self, transfer_id: str) -> int:
        """The newest progress; raises `TimeoutError` after `PROGRESS_S` without any, or what ended the request."""
        queue = self._progress[transfer_id]
        async with asyncio.timeout(PROGRESS_S):
            output = await queue.get()
        while not queue.empty():
            output = queue.get_nowait()
        if output.error is not None:
            raise output.error
        return output.num_computed_tokens

    async def _give_back(
        self, transfer_id: str, preparing: asyncio.Future[Any] | None, copies: PinnedCopies, pusher: Pusher | None
    ) -> None:
        if preparing is not None and not preparing.done():
            preparing.cancel()
            await wait_through(preparing)
        await copies.settle()
        if pusher is not None:
            await pusher.close()
        self._progress.pop(transfer_id, None)
        try:  # whether or not the reservation was made: a call whose caller was cancelled may still have made it
            await self._engine.release(transfer_id)
        except ShoalError:
            return  # the engine has ended and with it all its blocks


class _Standstill:
    """How long an engine has ended no step, as far as one looks."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._num_steps, self._since = -1, 0.0

    def seconds(self) -> float:
        now = time.monotonic()
        if self._engine.stats.num_steps != self._num_steps:
            self._num_steps, self._since = self._engine.stats.num_steps, now
        return now - self._since


class _Outgoing:
    """What one transfer has sent. Blocks are counted in send order: 0 is the one that holds token `send_from`."""

    def __init__(
        self, engine: EnginePort, order: PrefillOrder, block_ids: Sequence[int], pusher: Pusher,
        copies: PinnedCopies, block_size: int, counts: CopyCounts,
    ) -> None:
        self._engine, self._pusher, self._copies, self._block_size = engine, pusher, copies, block_size
        self._counts = counts
        self._wanted = len(order.token_ids) - 1
        self._send_from = order.send_from
        self._sources = block_ids[order.send_from // block_size : -(-self._wanted // block_size)]
        self.num_sent = 0
        self.num_bytes = 0

    async def push_up_to(self, computed: int) -> AsyncGenerator[Landed | Progress, None]:
        """Push every block that is complete at `computed` tokens; the tail block once all tokens are there."""
        complete = len(self._sources) if computed >= self._wanted else (
            max(0, computed - self._send_from) // self._block_size)
        pushing = self._begin_push(complete)
        while pushing is not None:
            async for progress in _signs_of_life(pushing, computed):
                yield progress
            await pushing
            first, self.num_sent = self.num_sent, self._next_end(complete)
            pushing = self._begin_push(complete)  # copies on while the event before it is on its way
            is_last = self.num_sent == len(self._sources)
            num_valid = (self._wanted - 1) % self._block_size + 1 if is_last else self._block_size
            yield Landed(first, self.num_sent - first, num_valid, computed)

    def _begin_push(self, complete: int) -> asyncio.Task[None] | None:
        if self.num_sent >= complete:
            return None
        sources = self._sources[self.num_sent : self._next_end(complete)]
        views = [self._engine.block_view(block_id) for block_id in sources]
        self.num_bytes += sum(len(view) for view in views)
        return self._copies.begin(_push(self._pusher, self.num_sent, views, self._counts))

    def _next_end(self, complete: int) -> int:
        return min(complete, self.num_sent + _MAX_PUSH_BLOCKS)


async def _signs_of_life(work: asyncio.Future[Any], computed: int) -> AsyncGenerator[Progress, None]:
    """Until the work is done, tell now and then that it goes on. The work bounds itself in time."""
    while not work.done():
        await asyncio.wait({work}, timeout=PROGRESS_S)
        if not work.done():
            yield Progress(computed)


async def _push(pusher: Pusher, first_block: int, views: Sequence[memoryview], counts: CopyCounts) -> None:
    started = time.perf_counter()
    await pusher.push(first_block, views)
    counts.seconds.observe(time.perf_counter() - started)
    counts.num_bytes += sum(map(len, views))
