"""Who reads which blocks. A lease's life: granted → released by its reader, or ended by time (`expire`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import NotFound
from kvstore_svc.chain_index import Block


@dataclass(frozen=True, slots=True)
class Lease:
    """The blocks are pinned while it lasts; `in_ssd` says which were only on SSD when it was asked for.

    `more`: the next block of the chain is present too, but there was no room to lease it.
    """

    lease_id: str
    blocks: tuple[Block, ...]
    expires_at: float  # monotonic
    in_ssd: tuple[bool, ...] = ()
    more: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)


class LeaseLedger:
    """Bounded by the bytes that leases may hold, which the store checks before it grants one."""

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self.leased_bytes = 0

    @property
    def num_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self._leases.values())

    def grant(self, blocks: Sequence[Block], in_ssd: Sequence[bool], lease_s: float, more: bool = False) -> Lease:
        lease = Lease(secrets.token_hex(8), tuple(blocks), time.monotonic() + lease_s, tuple(in_ssd), more)
        self._leases[lease.lease_id] = lease
        self.leased_bytes += lease.num_bytes
        return lease

    def find(self, lease_id: str) -> Lease:
        """Raises `NotFound` when it has ended."""
        if lease_id not in self._leases:
            raise NotFound(f"lease {lease_id!r} has ended", param="lease_id")
        return self._leases[lease_id]

    def release(self, lease_id: str) -> Lease | None:
        """None when it has ended already."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.leased_bytes -= lease.num_bytes
        return lease

    def expire(self, now: float) -> list[Lease]:
        """The leases that have just ended."""
        ended = [lease.lease_id for lease in self._leases.values() if lease.expires_at <= now]
        return [lease for lease in map(self.release, ended) if lease is not None]
