"""The identity of a KV block: a keyed, chained hash over the tokens it holds and all before it.

`H(parent || tokens as little-endian u32)`, blake2b-128, keyed by a secret of the deployment so that no client
can aim a collision at another tenant; the chain's root binds model, revision, dtype, block size, adapter and
tenant salt, each length-prefixed, so that fields from different sources can never run into each other.
The chained-hash prefix cache follows vLLM's; the keyed root is ours.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BlockHash = bytes  # 16 bytes
HASH_BYTES = 16
HASH_SCHEME = "blake2b128-keyed-v1"


@dataclass(frozen=True, slots=True)
class HashScheme:
    """What all blocks of one worker have in common. `key` is 16 to 64 secret bytes."""

    key: bytes
    model: str
    revision: str
    dtype: str
    block_size: int

    def __post_init__(self) -> None:
        if not 16 <= len(self.key) <= 64:
            raise ValueError(f"hash key must be 16 to 64 bytes, got {len(self.key)}")
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size}")

    def root(self, adapter: str = "", salt: str = "") -> BlockHash:
        """The parent of a chain's first block."""
        fields = (HASH_SCHEME, self.model, self.revision, self.dtype, str(self.block_size), adapter, salt)
        raw = b"".join(struct.pack("<I", len(b)) + b for b in (f.encode() for f in fields))
        return self._digest(raw)

    def extend(self, parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        """The hash of one full block; `tokens` has exactly `block_size` ids."""
        return self._digest(parent + _little_endian(tokens))

    def chain(self, root: BlockHash, tokens: Sequence[int]) -> list[BlockHash]:
        """The hashes of all full blocks of `tokens`, first to last; a partial tail has none."""
        out, parent = [], root
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            parent = self.extend(parent, tokens[start : start + self.block_size])
            out.append(parent)
        return out

    def _digest(self, raw: bytes) -> BlockHash:
        return hashlib.blake2b(raw, digest_size=HASH_BYTES, key=self.key).digest()


def _little_endian(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()
