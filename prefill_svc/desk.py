"""Who may hand off, and the hand-offs that run.

States of a transfer here: granted (until its lease ends) → running → ended. A transfer may run without a grant that
still lives, if there is room: the lease only keeps a place. `abort` ends a running one and waits until no copy of it
is left; of an unknown one there is nothing to wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from common import logs
from common.errors import FingerprintMismatch, InvalidRequest, Overloaded, ShoalError, Unavailable
from common.hand_off import Grant, PrefillEvent, PrefillOrder
from common.service_record import Fingerprint
from engine.kv_transfer.sender import Sender

log = logs.get(__name__)


class PrefillDesk:
    """`max_transfers` bounds the granted and running ones together."""

    def __init__(
        self, sender: Sender, fingerprint: Fingerprint, incarnation: str, *, max_transfers: int, grant_lease_s: float
    ) -> None:
        self._sender, self._fingerprint, self._incarnation = sender, fingerprint, incarnation
        self._max, self._lease_s = max_transfers, grant_lease_s
        self._granted: dict[str, tuple[float, int]] = {}  # transfer id → (end of the lease, prompt tokens)
        self._running: dict[str, tuple[asyncio.Task[object], int, int]] = {}  # → (task, epoch, prompt tokens)
        self._accepts = True

    @property
    def num_live(self) -> int:
        return len(self._running)

    @property
    def num_granted(self) -> int:
        """Places kept for transfers that have not begun. Changes nothing: a scrape asks from its own thread."""
        now = time.monotonic()
        return sum(end > now for end, _ in list(self._granted.values()))

    @property
    def num_queued_tokens(self) -> int:
        self._expire()
        return sum(n for _, n in self._granted.values()) + sum(n for _, _, n in self._running.values())

    def grant(self, transfer_id: str, num_prompt_tokens: int, fingerprint: Fingerprint) -> Grant:
        self._expire()
        refusal: ShoalError | None = None
        if fingerprint != self._fingerprint:
            refusal = FingerprintMismatch(f"this worker has {self._fingerprint}, the caller {fingerprint}")
        elif not self._accepts:
            refusal = Unavailable("the prefill worker is draining", retry_after_s=1.0)
        elif len(self._granted) + len(self._running) >= self._max:
            refusal = Overloaded(f"{self._max} hand-offs are granted, the limit", retry_after_s=1.0)
        if refusal is None:
            self._granted[transfer_id] = (time.monotonic() + self._lease_s, num_prompt_tokens)
        return Grant(
            granted=refusal is None, lease_s=self._lease_s, queued_requests=len(self._granted) + len(self._running),
            queued_tokens=self.num_queued_tokens, incarnation=self._incarnation, refusal=refusal)

    async def prefill(self, order: PrefillOrder) -> AsyncGenerator[PrefillEvent, None]:
        """Runs in the caller's task; cancelling that task, or `abort`, ends it with nothing left behind."""
        self._check(order)
        self._granted.pop(order.transfer_id, None)
        task = asyncio.current_task()
        assert task is not None
        self._running[order.transfer_id] = (task, order.epoch, len(order.token_ids))
        try:
            async with asyncio.timeout(order.timeout_s or None):
                events = self._sender.send(order)
                try:
                    async for event in events:
                        yield event
                finally:
                    await events.aclose()
        finally:
            del self._running[order.transfer_id]

    async def abort(self, transfer_id: str, epoch: int) -> bool:
        """True once no write of this epoch can land any more."""
        self._granted.pop(transfer_id, None)
        found = self._running.get(transfer_id)
        if found is None or found[1] != epoch:
            return True
        if not found[0].cancelling():
            found[0].cancel()
        while transfer_id in self._running:
            await asyncio.sleep(0.01)
        return True

    async def drain(self) -> None:
        self._accepts = False
        while self._running:
            await asyncio.sleep(0.05)

    def _check(self, order: PrefillOrder) -> None:
        self._expire()
        size = self._fingerprint.block_size
        if not self._accepts:
            raise Unavailable("the prefill worker is draining", retry_after_s=1.0)
        if order.model != self._fingerprint.model:
            raise InvalidRequest(f"model: this worker serves {self._fingerprint.model!r}", param="model")
        if order.transfer_id in self._running:
            raise InvalidRequest("transfer_id: in use by a running transfer", param="transfer_id")
        if order.send_from % size or not 0 <= order.send_from < max(1, len(order.token_ids) - 1):
            raise InvalidRequest(
                f"send_from: must be a multiple of {size} below the {len(order.token_ids) - 1} tokens of KV, "
                f"got {order.send_from}", param="send_from")
        if order.transfer_id not in self._granted and len(self._granted) + len(self._running) >= self._max:
            raise Overloaded(f"{self._max} hand-offs are granted, the limit", retry_after_s=1.0)

    def _expire(self) -> None:
        now = time.monotonic()
        for transfer_id in [t for t, (end, _) in self._granted.items() if end <= now]:
            del self._granted[transfer_id]
