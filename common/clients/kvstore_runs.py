"""How chains are cut into runs that live on one store node each.

A run is 128 blocks, counted from the chain's start, and is named by its first hash. Callers often know only a part of
a chain (what was just computed, what is missing), so places that were seen once are remembered: a part that follows a
known block continues its run. An unknown part counts as a chain's start, which costs hits on several nodes, never more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from common.block_hash import BlockHash

RUN_BLOCKS: Final = 128
MAX_REMEMBERED: Final = 1 << 17  # hashes


class Run(NamedTuple):
    """`hashes[start:end]` of a call belong to the run that begins with `head`."""

    head: BlockHash
    start: int
    end: int


class ChainRuns:
    """Remembers the place of each hash: its run's head and its index in the run."""

    def __init__(self) -> None:
        self._places: OrderedDict[BlockHash, tuple[BlockHash, int]] = OrderedDict()

    def cut(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None = None, *, from_start: bool = False
    ) -> list[Run]:
        """The runs of consecutive hashes; `from_start`: the first one is its chain's first."""
        runs: list[Run] = []
        if not hashes:
            return runs
        head, index = (hashes[0], 0) if from_start else self._place(hashes[0], parent)
        start = 0
        for position, block_hash in enumerate(hashes):
            if index == RUN_BLOCKS:
                runs.append(Run(head, start, position))
                head, index, start = block_hash, 0, position
            self._places[block_hash] = (head, index)
            self._places.move_to_end(block_hash)
            index += 1
        runs.append(Run(head, start, len(hashes)))
        while len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)
        return runs

    def _place(self, first: BlockHash, parent: BlockHash | None) -> tuple[BlockHash, int]:
        if first in self._places:
            return self._places[first]
        if parent is not None and parent in self._places:
            head, index = self._places[parent]
            return (head, index + 1) if index + 1 < RUN_BLOCKS else (first, 0)
        return first, 0
