"""The sender's side of the shared-memory transport."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from common.blocks.copy import copy_blocks
from common.blocks.landing import LANDING_PREFIX
from common.blocks.mapped_segments import MappedSegments
from common.blocks.segment import Segment
from common.errors import InvalidRequest, Unavailable
from common.hand_off import Ticket


class ShmPusher:
    """Writes into the landing file of a ticket, which must lie in `shm_dir`: one copy per block, in a thread."""

    def __init__(self, ticket: Ticket, shm_dir: Path, mapped: MappedSegments) -> None:
        path = shm_dir / Path(ticket.segment).name  # the receiver may know the same folder by another name
        if not path.name.startswith(LANDING_PREFIX):
            raise InvalidRequest("ticket.segment: must be a landing file", param="ticket.segment")
        self._ticket, self._path, self._mapped = ticket, path, mapped
        self._segment: Segment | None = None

    async def push(self, first_block: int, views: Sequence[memoryview]) -> None:
        size = self._ticket.block_bytes
        if first_block + len(views) > self._ticket.num_blocks or any(len(view) != size for view in views):
            raise InvalidRequest("ticket.num_blocks: the blocks do not fit the landing file", param="ticket")
        segment = self._open()
        pairs = [(segment.view((first_block + i) * size, size), view) for i, view in enumerate(views)]
        await asyncio.to_thread(copy_blocks, pairs)

    async def close(self) -> None:
        if self._segment is not None:
            self._mapped.give_back(self._segment)
            self._segment = None

    def _open(self) -> Segment:
        if self._segment is None:
            try:
                self._segment = self._mapped.take(self._path)
            except OSError as error:
                raise Unavailable(f"the receiver's landing file is gone: {error.strerror}") from None
        return self._segment
