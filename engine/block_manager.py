"""Which blocks each request has. The only writer of block tables and the only caller of the pool.

Per sequence:  no blocks ──allocate (with a prefix hit, shared), fork──▶ table grows ──free──▶ no blocks

A fork shares the full blocks of another sequence's head and gets a copy of the partly filled one (copy-on-write).

A block's hash is made public by `commit`, after the step or the transfer that filled it has ended, never before: a
hit must not lead to KV that is still being written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from common.block_hash import BlockHash, HashScheme
from engine.block_pool import BlockPool, LedgerError
from engine.request import Request
from engine.step import BlockCopy


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The leading blocks of a request that are cached; the scheduler reads them and changes nothing."""

    block_ids: tuple[int, ...] = ()
    num_tokens: int = 0


_NO_HIT = PrefixHit()


class BlockManager:
    """Matches, allocates, commits and frees the blocks of requests over one `BlockPool`."""

    def __init__(self, pool: BlockPool, scheme: HashScheme, enable_prefix_caching: bool = True) -> None:
        self._pool = pool
        self._scheme = scheme
        self._size = scheme.block_size
        self._caching = enable_prefix_caching

    @property
    def num_pinned(self) -> int:
        return self._pool.num_pinned

    @property
    def num_grantable(self) -> int:
        return self._pool.num_grantable

    def num_blocks(self, num_slots: int) -> int:
        """Blocks that cover so many token positions."""
        return -(-num_slots // self._size)

    def match(self, request: Request) -> PrefixHit:
        """The longest cached prefix in full blocks that leaves at least one token to compute.

        Valid until the next `allocate`, `commit` or `free`.
        """
        if not self._caching or request.scores_prompt:
            return _NO_HIT
        found: list[int] = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._size]:
            block_id = self._pool.lookup(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return PrefixHit(tuple(found), len(found) * self._size)

    def peek(self, token_ids: Sequence[int], adapter: str, salt: str) -> int:
        """The tokens that `match` would find for a new request; hashes no further than the first miss."""
        if not self._caching:
            return 0
        parent, first = self._scheme.root(adapter, salt), 0
        while first + self._size < len(token_ids):
            parent = self._scheme.extend(parent, token_ids[first : first + self._size])
            if self._pool.lookup(parent) is None:
                break
            first += self._size
        return first

    def allocate(self, request: Request, num_slots: int, hit: PrefixHit = _NO_HIT, *, num_spare: int = 0) -> bool:
        """Make the block table cover token positions `0 .. num_slots - 1`: all of it, or nothing and False.

        `hit` becomes the head of an empty table; its blocks are shared, not copied. `num_spare` more blocks must stay
        grantable.
        """
        missing = self.num_blocks(num_slots) - len(request.block_ids) - len(hit.block_ids)
        if not hit.block_ids:
            if missing > self._pool.num_grantable - num_spare:
                return False
            if missing > 0:
                request.block_ids += self._pool.take(missing)
            return True
        revived = sum(self._pool.is_grantable(block_id) for block_id in hit.block_ids)
        if missing > self._pool.num_grantable - revived - num_spare:
            return False
        self._pool.share(hit.block_ids)
        request.num_public_blocks = len(hit.block_ids)
        request.block_ids = hit.block_ids + self._pool.take(missing)
        return True

    def missing_blocks(self, request: Request) -> int:
        """Blocks that its table lacks for all its known tokens."""
        return self.num_blocks(request.num_tokens) - len(request.block_ids)

    def grow(self, requests: Sequence[Request]) -> None:
        """One more block for each; the pool has as many."""
        for request, block_id in zip(requests, self._pool.take(len(requests)), strict=True):
            request.block_ids += (block_id,)

    def share_head(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """A table of its own over the first tokens of a sequence, all computed; to be given to `release_table`."""
        table = request.block_ids[: self.num_blocks(num_tokens)]
        self._pool.share(table)
        return table

    def release_table(self, table: Sequence[int]) -> None:
        self._pool.release(reversed(table))

    def fork(self, request: Request, table: tuple[int, ...], num_tokens: int) -> list[BlockCopy] | None:
        """Blocks for all known tokens of a sequence without any: the full ones of `table`, shared, and new ones.

        What has to be copied for the first `num_tokens` to be there. Each source has one more reference until
        `release_sources`. None where the pool has too few blocks.
        """
        num_full = num_tokens // self._size
        missing = self.num_blocks(request.num_tokens) - num_full
        if missing > self._pool.num_grantable:
            return None
        sources = table[num_full:]
        self._pool.share(table)
        granted = self._pool.take(missing)
        request.block_ids = table[:num_full] + granted
        request.num_public_blocks = num_full if self._caching else 0
        return [BlockCopy(source, target) for source, target in zip(sources, granted, strict=False)]

    def release_sources(self, copies: Iterable[BlockCopy]) -> None:
        """The step that copies has retired."""
        self._pool.release(copy.source for copy in copies)

    def next_hash(self, request: Request, hit: PrefixHit) -> BlockHash | None:
        """The hash that a longer hit would need; None where there could be none."""
        index = len(hit.block_ids)
        end = min((request.num_tokens - 1) // self._size, len(request.block_hashes))
        if not self._caching or request.scores_prompt or index >= end:
            return None
        return request.block_hashes[index]

    def saved_part(self, request: Request) -> tuple[list[BlockHash], tuple[int, ...]]:
        """Hashes and ids of the full blocks of what is computed."""
        num_full = request.num_computed_tokens // self._size
        request.grow_hashes(self._scheme, num_full)
        return request.block_hashes[:num_full], request.block_ids[:num_full]

    def commit(self, request: Request) -> None:
        """Publish the blocks filled up to `num_computed_tokens`. The step or transfer that did so must have ended."""
        first, full = request.num_public_blocks, request.num_computed_tokens // self._size
        if not self._caching or full <= first:
            return
        request.grow_hashes(self._scheme, full)
        parent = request.block_hashes[first - 1] if first else request.root
        self._pool.publish(request.block_ids[first:full], request.block_hashes[first:full], parent)
        request.num_public_blocks = full

    def free(self, request: Request) -> None:
        """Give all blocks back; what is public stays cached. The last step that touches them must have retired."""
        self._pool.release(reversed(request.block_ids))
        request.block_ids = ()
        request.num_public_blocks = 0

    def pin(self, hashes: Iterable[BlockHash]) -> dict[BlockHash, int]:
        """Keep the content of these hashes, as far as it is cached now, until `unpin`: hash → block id."""
        return self._pool.pin(hashes)

    def unpin(self, block_ids: Iterable[int]) -> None:
        self._pool.unpin(block_ids)

    def count_leaked(self, owners: Collection[Request], tables: Iterable[Sequence[int]] = ()) -> int:
        """Blocks that neither these sequences nor these other tables hold, yet neither free nor cached. O(pool)."""
        return self._pool.count_leaked(chain((request.block_ids for request in owners), tables))

    def check(self, owners: Collection[Request], tables: Iterable[Sequence[int]] = ()) -> None:
        """Raise `LedgerError` unless pool and block tables agree. O(pool + tables).

        `owners`: all sequences with blocks; `tables`: what forks and launched copies hold beside them.
        """
        self._pool.check(chain((request.block_ids for request in owners), tables))
        for request in owners:
            if len(request.block_ids) * self._size < request.num_computed_tokens:
                raise LedgerError(
                    f"request {request.request_id} has {request.num_computed_tokens} computed tokens in "
                    f"{len(request.block_ids)} blocks of {self._size}")
            for block_id, own in zip(
                    request.block_ids[: request.num_public_blocks], request.block_hashes, strict=False):
                if self._pool.hash_of(block_id) != own:
                    raise LedgerError(f"request {request.request_id} holds block {block_id} of other content")
