"""The wire-free words of a hand-off: prompt KV that a prefill worker makes for a decode worker.

States of a transfer, at the decode worker D and the prefill worker P:

    D: granted ──reserve──▶ receiving ──chunk landed──▶ receiving ──done──▶ complete
          └─ refused, lost, stalled, aborted: D computes the rest itself ─┘
    P: granted ──Prefill──▶ computing and pushing ──last chunk acked──▶ done
          └─ lease over ─┘          └─ abort, D gone ─▶ aborted

Remote KV is only progress: a finished transfer is nothing but a higher count of computed tokens at D. Bytes land in an
area that belongs to this transfer alone; D copies them into its blocks, so a late write can never reach a block that
was granted again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import ShoalError
from common.service_record import Fingerprint

SHM = "shm"
GRPC = "grpc"


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where the receiver takes bytes. Block i of the send order lies at `i * block_bytes` of the landing area."""

    transport: str  # SHM or GRPC
    receiver_worker_id: str
    receiver_incarnation: str
    address: str  # of the receiver's gRPC server
    segment: str  # SHM: path of the landing file
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Grant:
    """P will take the transfer if it begins within `lease_s`; or the refusal, with P's queue."""

    granted: bool
    lease_s: float = 0.0
    queued_requests: int = 0
    queued_tokens: int = 0
    incarnation: str = ""
    refusal: ShoalError | None = None


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """What D asks of P: KV of all tokens but the last, delivered from token `send_from` (block-aligned) on."""

    transfer_id: str
    epoch: int
    model: str
    token_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    send_from: int
    ticket: Ticket
    timeout_s: float
    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Landed:
    """These blocks of the send order have landed whole, but for the last, of which `num_valid` slots are valid."""

    first_block: int
    num_blocks: int
    num_valid: int
    num_tokens_computed: int  # at P when it was pushed: below the prompt's while P still computes


@dataclass(frozen=True, slots=True)
class Progress:
    """P is alive: still queued or computing."""

    num_tokens_computed: int


@dataclass(frozen=True, slots=True)
class Done:
    """All blocks have landed. P took `num_cached_tokens` from its cache or the store and computed the rest."""

    num_tokens_computed: int
    num_cached_tokens: int
    bytes_sent: int
    queue_s: float = 0.0


PrefillEvent = Landed | Progress | Done


class PrefillPort(Protocol):
    """Prefill workers as a decode worker sees them. Each call raises `ShoalError`."""

    async def grant(
        self, address: str, transfer_id: str, *, model: str, num_prompt_tokens: int, fingerprint: Fingerprint,
    ) -> Grant: ...

    def prefill(self, address: str, order: PrefillOrder) -> AsyncIterator[PrefillEvent]: ...

    async def abort(self, address: str, transfer_id: str, epoch: int) -> None:
        """Valid in every state; best effort within a second."""


class Pusher(Protocol):
    """P's side of a transport: writes blocks where a ticket says."""

    async def push(self, first_block: int, views: Sequence[memoryview]) -> None:
        """Return when the receiver can read them. Raises `ShoalError` when the receiver is gone."""

    async def close(self) -> None: ...


class Landing(Protocol):
    """D's side of a transport: the area of one transfer."""

    @property
    def ticket(self) -> Ticket: ...

    def view(self, index: int) -> memoryview:
        """The bytes of block `index` of the send order."""

    def close(self, *, quiet: bool) -> None:
        """Forget the area; a write that comes later reaches nothing. `quiet`: the sender said that none will come."""
