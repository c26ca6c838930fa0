"""What the device keeps of each running sequence: one stable row, from its join to `free`.

A row: free ──take──▶ taken ──free──▶ free. All state is one array of 32-bit words with named regions, so that whatever
a step changes goes up as one list of (index, word) and lands in one launch. A captured step advances the rows itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.errors import InternalError
from kernels.scatter_words import scatter_words

_MAX_CHANGES = 1 << 18  # of one launch
_SLOTS = 4  # staging buffers: one step is in flight, one is being made, and then some
_SCALARS = 6  # words of a row beside its table: last token, computed, output position, temperature, key (2)


class DeviceRows:
    """`max_rows` sequences with at most `max_blocks` blocks each."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.max_rows, self.max_blocks = max_rows, max_blocks
        self._words = torch.zeros(max_rows * (_SCALARS + max_blocks), dtype=torch.int32, device=device)
        regions = self._words[: _SCALARS * max_rows].view(_SCALARS, max_rows)
        self.keys = regions[:2].reshape(-1).view(torch.int64)  # [max_rows] first, for its alignment
        self.last_tokens, self.num_computed, self.output_positions = regions[2], regions[3], regions[4]
        self.temperatures = regions[5].view(torch.float32)
        self.tables = self._words[_SCALARS * max_rows :].view(max_rows, max_blocks)
        self._free = list(range(max_rows))[::-1]
        self._tables: list[Sequence[int]] = [()] * max_rows  # the block table that each row has, once staged
        self._indices: list[int] = []
        self._values: list[int] = []
        self._staging = [torch.zeros(2 * _MAX_CHANGES, dtype=torch.int32).pin_memory() for _ in range(_SLOTS)]
        self._landing = torch.zeros(2 * _MAX_CHANGES, dtype=torch.int32, device=device)
        self._turn = 0

    def take(self, key: int, temperature: float) -> int:
        """A free row for a new sequence; `key` is the sampler's 64-bit word.

        A row is free again before the step after its sequence's end is launched, so that twice as many rows as
        sequences run at once are never all taken.
        """
        if not self._free:
            raise InternalError(f"all {self.max_rows} rows of the device are taken: ended sequences are not forgotten")
        row = self._free.pop()
        self._tables[row] = ()
        self._put(2 * row, key & 0xFFFFFFFF)
        self._put(2 * row + 1, key >> 32)
        self._put(5 * self.max_rows + row, int(np.float32(temperature).view(np.uint32)))
        return row

    def free(self, row: int) -> None:
        self._free.append(row)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def place(self, row: int, num_computed: int, output_position: int) -> None:
        """How far the sequence is, where the device does not know it by itself; its last token stays."""
        self._put(3 * self.max_rows + row, num_computed)
        self._put(4 * self.max_rows + row, output_position)

    def place_all(
        self, rows: NDArray[np.int32], last_tokens: Sequence[int], num_computed: Sequence[int],
        output_positions: Sequence[int],
    ) -> None:
        """Where these sequences stand, last tokens included."""
        if len(self._indices) + 3 * len(rows) > _MAX_CHANGES:
            self.flush()
        for region, values in ((2, last_tokens), (3, num_computed), (4, output_positions)):
            self._indices += (region * self.max_rows + rows).tolist()
            self._values += values

    def set_table(self, row: int, block_ids: Sequence[int]) -> None:
        """The row's blocks; only those that are new go up. A table only grows: a preempted sequence gets a new row."""
        known = self._tables[row]
        if known is block_ids:
            return
        if len(block_ids) > self.max_blocks:
            raise InternalError(f"a block table of {len(block_ids)} blocks, the device's rows hold {self.max_blocks}")
        first = _SCALARS * self.max_rows + row * self.max_blocks
        for index in range(len(known), len(block_ids)):
            self._put(first + index, block_ids[index])
        self._tables[row] = block_ids

    def flush(self) -> None:
        """Send what has changed, in stream order."""
        num = len(self._indices)
        if not num:
            return
        slot = self._staging[self._turn % _SLOTS]
        self._turn += 1
        slot[:num] = torch.from_numpy(np.array(self._indices, dtype=np.int32))
        slot[num : 2 * num] = torch.from_numpy(np.array(self._values, dtype=np.uint32).view(np.int32))
        landed = self._landing[: 2 * num]  # one run of bytes: a copy of rows apart would not be asynchronous
        landed.copy_(slot[: 2 * num], non_blocking=True)
        scatter_words(self._words, landed.view(2, num), num)
        self._indices.clear()
        self._values.clear()

    def _put(self, index: int, value: int) -> None:
        if len(self._indices) == _MAX_CHANGES:
            self.flush()
        self._indices.append(index)
        self._values.append(value)
