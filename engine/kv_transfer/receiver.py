"""The decode side of a hand-off (states: see `common.hand_off`)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from common import logs, trace
from common.blocks.copy import copy_blocks
from common.bucket_counts import BucketCounts
from common.errors import InternalError, Overloaded, ShoalError, Unavailable
from common.hand_off import Done, Landed, Landing, PrefillEvent, PrefillOrder, PrefillPort, Ticket
from common.metrics import TRANSFER_BUCKETS
from common.service_record import Fingerprint
from common.span import Span
from engine.engine_port import EnginePort
from engine.kv_transfer.pinned_copy import PinnedCopies, wait_through
from engine.kv_transfer.recent_rate import RecentRate
from engine.request import EngineRequest

log = logs.get(__name__)


@dataclass(slots=True)
class TransferCounts:
    """What a worker has received, per transport."""

    num_transfers: int = 0
    num_fallbacks: int = 0  # ended early; the rest was computed here
    num_blocks: int = 0
    num_bytes: int = 0
    num_overlapped: int = 0  # transfers whose first block landed before the sender had computed the last token
    seconds: float = 0.0  # of the copies into blocks
    copies: BucketCounts = field(default_factory=lambda: BucketCounts(TRANSFER_BUCKETS))  # seconds of each copy
    hand_offs: BucketCounts = field(default_factory=lambda: BucketCounts(TRANSFER_BUCKETS))  # asked → last block here


@dataclass(frozen=True, slots=True)
class Route:
    """A prefill worker and the way its bytes come."""

    worker_id: str
    address: str
    transport: str


@dataclass(frozen=True, slots=True)
class Received:
    """Progress after a transfer, and how many of these tokens nobody had to compute for this request."""

    num_tokens: int
    num_cached_tokens: int


class Receiver:
    """Takes KV from prefill workers into reserved blocks. `open_landing` makes an area for (transport, blocks)."""

    def __init__(
        self, engine: EnginePort, prefill: PrefillPort, open_landing: Callable[[str, str, int], Landing],
        fingerprint: Fingerprint, *, stall_s: float,
    ) -> None:
        self._engine, self._prefill, self._open_landing = engine, prefill, open_landing
        self._fingerprint = fingerprint
        self._stall_s = stall_s
        self._block_size = fingerprint.block_size
        self._epoch = 0
        self.counts: dict[str, TransferCounts] = {}
        self.rate = RecentRate()

    async def receive(
        self, route: Route, request: EngineRequest, block_ids: Sequence[int], num_present: int, timeout_s: float
    ) -> Received:
        """As `_receive`, in a span of its own: the whole hand-off, the prefill worker's time included."""
        with trace.span("kv.transfer", trace.CLIENT, {
                "shoal.kv.from": route.worker_id, "shoal.kv.transport": route.transport}) as span:
            return await self._receive(route, request, block_ids, num_present, timeout_s, span)

    async def _receive(
        self, route: Route, request: EngineRequest, block_ids: Sequence[int], num_present: int, timeout_s: float,
        span: Span,
    ) -> Received:
        """Bring progress from `num_present` tokens (block-aligned) to all but the last, or as far as it gets.

        A refusal, a loss or a stall ends it early and is not an error: what has landed counts, the engine computes
        the rest. A cancellation waits for the copy in hand, so the caller may release the blocks afterwards.
        """
        counts = self.counts.setdefault(route.transport, TransferCounts())
        counts.num_transfers += 1
        started = time.perf_counter()
        transfer_id = f"{request.request_id}-{secrets.token_hex(4)}"
        self._epoch += 1
        transfer = _Transfer(self._engine, request, block_ids, num_present, self._block_size, counts, self.rate)
        landing: Landing | None = None
        quiet = False  # the sender has said that it writes no more
        try:
            async with asyncio.timeout(timeout_s):
                await self._ask_for_slot(route, transfer_id, request)
                landing = self._open_landing(route.transport, transfer_id, transfer.num_blocks)
                order = _order(request, transfer_id, self._epoch, self._fingerprint.model, num_present,
                               landing.ticket, timeout_s)
                async with aclosing(_watched(self._prefill.prefill(route.address, order), self._stall_s)) as events:
                    async for event in events:
                        await transfer.take(event, landing)
            quiet = True
            counts.hand_offs.observe(time.perf_counter() - started)
        except (ShoalError, TimeoutError) as error:
            counts.num_fallbacks += 1
            span.fail(error)
            log.warning("hand_off_failed", prefill=route.worker_id, have=transfer.num_landed_tokens, why=str(error))
            await self._prefill.abort(route.address, transfer_id, self._epoch)
        except asyncio.CancelledError:
            await asyncio.shield(self._prefill.abort(route.address, transfer_id, self._epoch))
            raise
        finally:
            try:
                await transfer.settle()
            finally:
                span.put({"shoal.kv.blocks": transfer.num_blocks_landed, "shoal.kv.bytes": transfer.num_bytes_landed})
                if landing is not None:
                    landing.close(quiet=quiet)
        return Received(transfer.num_landed_tokens, transfer.num_cached_tokens)

    async def _ask_for_slot(self, route: Route, transfer_id: str, request: EngineRequest) -> None:
        grant = await self._prefill.grant(
            route.address, transfer_id, model=self._fingerprint.model,
            num_prompt_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
            fingerprint=self._fingerprint)
        if not grant.granted:
            raise grant.refusal or Overloaded(
                f"{grant.queued_requests} transfers are queued at {route.worker_id}", retry_after_s=1.0)


class _Transfer:
    """Copies landed blocks into their final places, one copy at a time, and tells the engine."""

    def __init__(
        self, engine: EnginePort, request: EngineRequest, block_ids: Sequence[int], num_present: int,
        block_size: int, counts: TransferCounts, rate: RecentRate,
    ) -> None:
        self._engine, self._request_id, self._counts, self._rate = engine, request.request_id, counts, rate
        self._block_size = block_size
        self._num_wanted = len(request.prompt_token_ids) + len(request.output_token_ids) - 1
        first = num_present // block_size
        self._targets = list(block_ids[first : -(-self._num_wanted // block_size)])
        self._first_token = num_present
        self.num_blocks_landed = self.num_bytes_landed = 0
        self._copies = PinnedCopies()
        self._telling: asyncio.Future[None] | None = None  # the last call that told the engine of progress
        self.num_landed_tokens = num_present
        self.num_cached_tokens = num_present

    @property
    def num_blocks(self) -> int:
        return len(self._targets)

    async def take(self, event: PrefillEvent, landing: Landing) -> None:
        if isinstance(event, Landed):
            self._check(event)
            if self.num_blocks_landed == 0 and event.num_tokens_computed < self._num_wanted:
                self._counts.num_overlapped += 1
            await self._copy_in(event, landing)
            landed = self.num_landed_tokens = min(
                self._num_wanted, self._first_token + self.num_blocks_landed * self._block_size)
            await self._told()
            # The next copy does not wait for it.
            self._telling = asyncio.ensure_future(self._engine.land(self._request_id, landed))
        elif isinstance(event, Done):
            await self._told()
            self.require_complete()
            self.num_cached_tokens = max(self._first_token, min(event.num_cached_tokens, self._num_wanted))

    def require_complete(self) -> None:
        if self.num_blocks_landed != len(self._targets):
            raise InternalError(
                f"the sender ended after {self.num_blocks_landed} of {len(self._targets)} blocks")

    async def settle(self) -> None:
        """Return when no copy of ours touches a block any more, and the engine knows what has landed."""
        await self._copies.settle()
        if self._telling is not None:
            await wait_through(self._telling)
            self._telling.exception()  # an engine that has ended says so in the next call, too

    async def _told(self) -> None:
        if self._telling is not None:
            await asyncio.shield(self._telling)

    def _check(self, event: Landed) -> None:
        end = event.first_block + event.num_blocks
        if event.first_block != self.num_blocks_landed or not event.first_block < end <= len(self._targets):
            raise InternalError(f"blocks {event.first_block}..{end} landed, expected from {self.num_blocks_landed}")
        is_last = end == len(self._targets)
        num_valid = (self._num_wanted - 1) % self._block_size + 1 if is_last else self._block_size
        if event.num_valid != num_valid:
            raise InternalError(f"{event.num_valid} slots of the last block are valid, expected {num_valid}")

    async def _copy_in(self, event: Landed, landing: Landing) -> None:
        indices = range(event.first_block, event.first_block + event.num_blocks)
        pairs = [(self._engine.block_view(self._targets[i]), landing.view(i)) for i in indices]
        seconds = await self._copies.run_thread(lambda: copy_blocks(pairs))
        self._counts.seconds += seconds
        self._counts.copies.observe(seconds)
        self.num_blocks_landed += event.num_blocks
        self._counts.num_blocks += event.num_blocks
        num_bytes = sum(len(source) for _, source in pairs)
        self.num_bytes_landed += num_bytes
        self._counts.num_bytes += num_bytes
        self._rate.add(num_bytes, seconds)


# The sender says nothing while its engine stands still, so whatever it says is a sign of life.
async def _watched(events: AsyncIterator[PrefillEvent], stall_s: float) -> AsyncGenerator[PrefillEvent, None]:
    """The events up to `Done`; raises `Unavailable` after `stall_s` without one."""
    try:
        while True:
            try:
                async with asyncio.timeout(stall_s):
                    event = await anext(events)
            except TimeoutError:
                raise Unavailable(f"no sign of progress for {stall_s:g} s") from None
            except StopAsyncIteration:
                raise Unavailable("the sender ended the stream before it was done") from None
            yield event
            if isinstance(event, Done):
                return
    finally:
        await cast("AsyncGenerator[PrefillEvent, None]", events).aclose()


def _order(
    request: EngineRequest, transfer_id: str, epoch: int, model: str, send_from: int, ticket: Ticket, timeout_s: float
) -> PrefillOrder:
    return PrefillOrder(
        transfer_id=transfer_id, epoch=epoch, model=model,
        token_ids=(*request.prompt_token_ids, *request.output_token_ids),
        block_hashes=() if request.output_token_ids else tuple(request.block_hashes or ()), send_from=send_from,
        ticket=ticket, timeout_s=timeout_s, adapter=request.adapter, cache_salt=request.cache_salt)

