"""The open end of a prompt that a generated turn goes on from, as it travels through the gateway.

The tokenizer makes it with a prompt's ids; whoever detokenizes the answer hands it back and need not look inside.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from common.errors import InvalidRequest

DIGEST_BYTES: Final = 16
MAX_TAIL_IDS: Final = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """`scope` tells tenants apart, `before` is the digest of all ids before the prompt's last segment."""

    scope: bytes  # 16 bytes
    before: bytes  # 16 bytes
    tail: array[int]  # ids of the last segment, u32; at most MAX_TAIL_IDS

    def wire(self) -> bytes:
        return self.scope + self.before + self.tail.tobytes()

    @staticmethod
    def from_wire(raw: bytes) -> Turn:
        """Raises `InvalidRequest` for bytes that `wire` cannot have made."""
        tail = raw[2 * DIGEST_BYTES :]
        if len(raw) < 2 * DIGEST_BYTES or len(tail) % 4 or len(tail) > 4 * MAX_TAIL_IDS:
            raise InvalidRequest(
                f"turn: must be 32 bytes and at most {MAX_TAIL_IDS} ids of 4 bytes, got {len(raw)} bytes", param="turn")
        ids = array("I")
        ids.frombytes(tail)
        return Turn(raw[:DIGEST_BYTES], raw[DIGEST_BYTES : 2 * DIGEST_BYTES], ids)


def scope_of(cache_salt: str) -> bytes:
    return blake2b(cache_salt.encode(), digest_size=DIGEST_BYTES).digest()


class PrefixDigest:
    """The digest of a list of ids that only grows."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=DIGEST_BYTES)
        self._num_taken = 0

    def of(self, ids: array[int], num_ids: int) -> bytes:
        """Of the first `num_ids`, at least as many as the last time."""
        self._hash.update(ids[self._num_taken : num_ids].tobytes())
        self._num_taken = num_ids
        return self._hash.digest()
