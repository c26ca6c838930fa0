"""What an engine says of its cached content: facts in order, each idempotent."""

from __future__ import annotations

from dataclasses import dataclass

from common.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """The hashes became public; consecutive in one chain, the first following `parent`. Idempotent."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """No block holds the content of these hashes any more."""

    hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Forget every hash of this engine; what follows is to be believed again."""


KvEvent = BlockStored | BlockRemoved | BlocksCleared
