"""Mappings of other processes' segments, kept from one use to the next: mapping a page again costs about a copy.

A mapping's life: taken (mapped at the first time) → in use → given back → idle → taken again, under whatever name the
file has then, or closed: its file was unlinked, too many are idle, or `close`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

from common.blocks.segment import Segment

MAX_IDLE: Final = 16


class MappedSegments:
    """Each mapping has one user at a time. An unlinked file's memory is let go at the next call, whichever it is."""

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._max_idle = max_idle
        self._idle: OrderedDict[tuple[int, int], Segment] = OrderedDict()  # by file, not by name; oldest first

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def take(self, path: Path) -> Segment:
        """Raises `OSError` when the file is gone."""
        self._forget_unlinked()
        found = os.stat(path)
        return self._idle.pop((found.st_dev, found.st_ino), None) or Segment.open(path)

    def give_back(self, segment: Segment) -> None:
        if segment.file_id in self._idle:  # a second mapping, made while the first was in use
            segment.close()
        else:
            self._idle[segment.file_id] = segment
        self._forget_unlinked()
        while len(self._idle) > self._max_idle:
            self._idle.popitem(last=False)[1].close()

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[1].close()

    def _forget_unlinked(self) -> None:
        for file_id in [file_id for file_id, segment in self._idle.items() if segment.is_unlinked]:
            self._idle.pop(file_id).close()
