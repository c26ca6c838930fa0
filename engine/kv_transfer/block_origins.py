"""Which traced request a cached block is due to, so that what happens to it later can point back.

A block's life here: noted, when a request asks for it → forgotten, oldest first, beyond `MAX_BLOCKS`. Blocks that
follow a noted one in a chain, such as those of the answer, have its origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from opentelemetry.trace import SpanContext

from common import trace
from common.block_hash import BlockHash

MAX_BLOCKS: Final = 16_384


class BlockOrigins:
    """Empty, and free of cost, while nothing is traced."""

    def __init__(self) -> None:
        self._spans: dict[BlockHash, SpanContext] = {}

    def note(self, hashes: Sequence[BlockHash]) -> None:
        """The current span is about these blocks."""
        span = trace.sampled_context()
        if span is not None:
            self._add(hashes, span)

    def of(self, hashes: Sequence[BlockHash], parent: BlockHash) -> SpanContext | None:
        """The span that the first known of `parent` and the blocks after it is due to."""
        if not self._spans:
            return None
        span = next((self._spans[h] for h in (parent, *hashes) if h in self._spans), None)
        if span is not None:
            self._add([h for h in hashes if h not in self._spans], span)
        return span

    def _add(self, hashes: Sequence[BlockHash], span: SpanContext) -> None:
        self._spans.update(dict.fromkeys(hashes, span))
        excess = len(self._spans) - MAX_BLOCKS
        for block_hash in list(islice(self._spans, max(0, excess))):
            del self._spans[block_hash]
