"""The KV blocks of one engine: who owns each, and which content is found under which hash.

Every block has exactly one owner class:

    free ──take──▶ requests ──publish──▶ requests (hashed) ──release, still pinned──▶ pinned
     ▲                │ release             │ release                                │ ▲
     ├────────────────┘                     ▼ ◀──────────────unpin───────────────────┘ │
     └──────────take (eviction), clear── cached ──share──▶ requests (hashed)           │
                                            └──────────────────pin─────────────────────┘

`free`: no references, no hash. `requests`: one reference per block table that holds it. `pinned`: no block table
holds it, but a reader of its content does, with one reference per pin. `cached`: no references, but its hash is
still public, so a later request may share it; it is grantable like a free block.

The free queue holds free and cached blocks, least recently used first; blocks without cached content stand at
its front, so content is evicted only when nothing else is left. Two running requests may hold the same content
in two blocks (both computed it in the same step); a cached block is always the only holder of its hash. The
free queue with hashes kept until a block is granted again follows vLLM's block pool.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from common.block_hash import BlockHash
from common.kv_event import BlockRemoved, BlocksCleared, BlockStored, KvEvent


class BlockCounts(NamedTuple):
    """Blocks by owner class; the four always sum to the pool."""

    free: int
    cached: int
    requests: int
    pinned: int = 0  # and in no block table


class LedgerError(RuntimeError):
    """The ownership ledger does not add up; the message says where."""


class BlockPool:
    """Grants, shares and takes back blocks `0 .. num_blocks - 1`. All operations are O(blocks named).

    With `max_events` > 0, events are recorded for `take_events`. A reader that falls behind by more than
    `max_events` gets `BlocksCleared` in place of what it missed: it then knows less than is cached, never more.
    """

    def __init__(self, num_blocks: int, max_events: int = 0) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks  # of block tables and pins
        self._pins: Counter[int] = Counter()  # of pinned blocks only
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._holders: dict[BlockHash, tuple[int, ...]] = {}  # a public hash -> the blocks with its content
        self._grantable: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to grant first
        self._max_events = max_events
        self._events: list[KvEvent] = []

    @property
    def num_grantable(self) -> int:
        """Free and cached blocks."""
        return len(self._grantable)

    @property
    def num_pinned(self) -> int:
        """Blocks with a pin, whether or not a block table holds them too."""
        return len(self._pins)

    def is_grantable(self, block_id: int) -> bool:
        return self._references[block_id] == 0

    def lookup(self, block_hash: BlockHash) -> int | None:
        """A block that holds the content, to be kept by `share` before the next `take`."""
        holders = self._holders.get(block_hash)
        return holders[0] if holders else None

    def hash_of(self, block_id: int) -> BlockHash | None:
        """The public hash of the block's content, if it has one."""
        return self._hash_of[block_id]

    def take(self, num: int) -> tuple[int, ...]:
        """Grant `num` blocks with one reference each; evicts cached content where needed."""
        if num > len(self._grantable):
            raise LedgerError(f"{num} blocks asked for, {len(self._grantable)} grantable")
        taken, gone = [], []
        for _ in range(num):
            block_id, _ = self._grantable.popitem(last=False)
            taken.append(block_id)
            self._references[block_id] = 1
            block_hash = self._hash_of[block_id]
            if block_hash is not None and self._drop_hash(block_id):
                gone.append(block_hash)
        if gone:
            self._record(BlockRemoved(tuple(gone)))
        return tuple(taken)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each; a cached block leaves the free queue."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._grantable[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Take one reference from each. Give a chain leaf first, so that leaves are evicted before their parents."""
        for block_id in block_ids:
            if self._references[block_id] < 1:
                raise LedgerError(f"block {block_id} released without a reference")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._shelve(block_id)

    def pin(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, int]:
        """One more reference to a block of each hash that is public now; the others are left out."""
        pinned = {h: block_id for h in hashes if (block_id := self.lookup(h)) is not None}
        self.share(pinned.values())
        self._pins.update(pinned.values())
        return pinned

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Take one pin from each block. Give a chain in its own order; see `release`."""
        block_ids = list(block_ids)
        for block_id in block_ids:
            if not self._pins[block_id]:
                raise LedgerError(f"block {block_id} unpinned without a pin")
            self._pins[block_id] -= 1
            if not self._pins[block_id]:
                del self._pins[block_id]
        self.release(reversed(block_ids))

    def publish(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], parent: BlockHash) -> None:
        """Make the content of full, referenced blocks findable. The step that wrote them must have retired."""
        is_new = False
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if self._references[block_id] == 0 or self._hash_of[block_id] is not None:
                raise LedgerError(f"block {block_id} cannot be published: free, or published before")
            self._hash_of[block_id] = block_hash
            holders = self._holders.get(block_hash)
            if holders is None:
                is_new = True
                self._holders[block_hash] = (block_id,)
                continue
            self._holders[block_hash] = (*holders, block_id)
            for twin in holders:
                if self._references[twin] == 0:
                    self._drop_hash(twin)
                    self._grantable.move_to_end(twin, last=False)
        if is_new:
            self._record(BlockStored(tuple(hashes), parent))

    def clear(self) -> int:
        """Forget all cached content and return how many blocks had some; blocks in use keep their hashes."""
        gone = []
        for block_id in self._grantable:
            block_hash = self._hash_of[block_id]
            if block_hash is not None and self._drop_hash(block_id):
                gone.append(block_hash)
        if not self._holders:
            self._record(BlocksCleared())
        elif gone:
            self._record(BlockRemoved(tuple(gone)))
        return len(gone)

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def counts(self) -> BlockCounts:
        """O(pool)."""
        cached = sum(self._hash_of[block_id] is not None for block_id in self._grantable)
        pinned = sum(self._references[block_id] == pins for block_id, pins in self._pins.items())
        free = len(self._grantable) - cached
        return BlockCounts(free, cached, self.num_blocks - len(self._grantable) - pinned, pinned)

    def count_leaked(self, tables: Iterable[Sequence[int]]) -> int:
        """Blocks with more references than the given block tables, those of all live requests, account for. O(pool)."""
        owed = self._owed(tables)
        return sum(have > owed[block_id] for block_id, have in enumerate(self._references))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `LedgerError` unless every block has exactly one owner; `tables` as in `count_leaked`. O(pool)."""
        owed = self._owed(tables)
        for block_id, have in enumerate(self._references):
            if have != owed[block_id]:
                raise LedgerError(
                    f"block {block_id} has {have} references, {owed[block_id]} block tables and pins hold it")
            if (have == 0) != (block_id in self._grantable):
                where = "missing from" if have == 0 else "also in"
                raise LedgerError(f"block {block_id} has {have} references and is {where} the free queue")
            block_hash = self._hash_of[block_id]
            if block_hash is not None and block_id not in self._holders.get(block_hash, ()):
                raise LedgerError(f"block {block_id} has hash {block_hash.hex()} but is not found under it")
        in_tables = sum(owed[block_id] > pins for block_id, pins in self._pins.items())
        in_tables += len(owed) - len(self._pins)
        counts = self.counts()
        if (counts.requests, sum(counts)) != (in_tables, self.num_blocks):
            raise LedgerError(f"{counts} do not sum to {self.num_blocks} blocks, {in_tables} of them in block tables")
        for block_hash, holders in self._holders.items():
            if any(self._hash_of[block_id] != block_hash for block_id in holders):
                raise LedgerError(f"hash {block_hash.hex()} leads to a block of other content: {holders}")
            if len(holders) > 1 and any(self._references[block_id] == 0 for block_id in holders):
                raise LedgerError(f"hash {block_hash.hex()} is cached more than once: {holders}")

    def _owed(self, tables: Iterable[Sequence[int]]) -> Counter[int]:
        owed = Counter(block_id for table in tables for block_id in table)
        owed.update(self._pins)
        return owed

    def _shelve(self, block_id: int) -> None:
        """Put a block without references into the free queue: at the end if it is worth keeping."""
        self._grantable[block_id] = None
        block_hash = self._hash_of[block_id]
        if block_hash is not None and len(self._holders[block_hash]) > 1:
            self._drop_hash(block_id)
        if self._hash_of[block_id] is None:
            self._grantable.move_to_end(block_id, last=False)

    def _drop_hash(self, block_id: int) -> bool:
        """Take the hash from a block; True if its content is now nowhere else."""
        block_hash = self._hash_of[block_id]
        assert block_hash is not None
        self._hash_of[block_id] = None
        others = tuple(other for other in self._holders[block_hash] if other != block_id)
        if others:
            self._holders[block_hash] = others
        else:
            del self._holders[block_hash]
        return not others

    def _record(self, event: KvEvent) -> None:
        if self._max_events == 0:
            return
        if isinstance(event, BlocksCleared):
            self._events.clear()
        elif len(self._events) >= self._max_events:
            self._events = [BlocksCleared()]
        self._events.append(event)
