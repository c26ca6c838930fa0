"""The KV store as an engine's worker sees it. No call raises for a store that is away: there is just less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.block_hash import BlockHash
from common.service_record import Fingerprint

Sink = Callable[[int, memoryview], None]  # (index in the chain, bytes of the block); called in a worker thread


class StorePort(Protocol):
    async def lookup(self, hashes: Sequence[BlockHash], fingerprint: Fingerprint) -> int:
        """How many leading blocks of the chain are present."""

    async def get(self, hashes: Sequence[BlockHash], fingerprint: Fingerprint, sink: Sink) -> int:
        """Hand the longest present prefix to `sink`, checksums verified; how many blocks that were.

        However often it is cancelled, it returns only when no thread of it calls `sink` any more.
        """

    async def put(
        self, hashes: Sequence[BlockHash], parent: BlockHash, fingerprint: Fingerprint, views: Sequence[memoryview]
    ) -> int:
        """Store the blocks that are absent; how many that were."""
