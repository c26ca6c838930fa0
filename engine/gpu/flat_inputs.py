"""What a step with chunks tells the device, as one run of 32-bit words, so that it is one copy.

The tokens of a step lie flat: those of decode rows first, then chunk after chunk, then padding. A token is known, or
it is the one that its sequence's row on the device has drawn last: then its code is -1 minus that row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.step import UNKNOWN_TOKEN, PlannedRow
from kernels.extend_attention import make_tiles, tile_tokens

Int32s = NDArray[np.int32]
_ALIGNMENT = 4  # words: a kernel is compiled anew for a pointer that is aligned in another way


@dataclass(frozen=True, slots=True)
class FlatParts:
    """Views of the words; NumPy's on the host, torch's on the device."""

    codes: Any  # [num_tokens]
    positions: Any  # [num_tokens]; of no meaning for decode rows
    slots: Any  # [num_tokens]; -1: not written here (decode rows and padding)
    decode_rows: Any  # [num_rows] rows of the device that decode, -1: padding
    drawing: Any  # [num_rows] rows that draw: those that decode, then those of chunks that sample; -1: padding
    selected: Any  # [num_rows] flat token whose logits they draw from
    tiles: Any  # [4 * num_tiles], see `make_tiles`; no tokens: padding


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """How many of each there are room for."""

    num_tokens: int
    num_rows: int
    num_tiles: int

    @staticmethod
    def padded(num_tokens: int, num_rows: int, group: int) -> FlatLayout:
        """For any plan of at most so many tokens in at most so many rows."""
        return FlatLayout(num_tokens, num_rows, num_tokens // tile_tokens(group) + num_rows)

    @property
    def num_words(self) -> int:
        return self._ends()[-1]

    def split(self, words: Any) -> FlatParts:
        """`words`: at least `num_words`, of NumPy or torch."""
        firsts = (0, *self._ends())
        return FlatParts(*(words[first : first + size] for first, size in zip(firsts, self._sizes(), strict=False)))

    def _sizes(self) -> tuple[int, ...]:
        return (*(self.num_tokens,) * 3, *(self.num_rows,) * 3, 4 * self.num_tiles)

    def _ends(self) -> list[int]:
        ends, end = [], 0
        for size in self._sizes():
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
            ends.append(end)
        return ends


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """A step's rows as the device takes them. `chunk_rows[i]` is the device's row of chunk i."""

    decode_rows: Int32s
    chunks: Sequence[PlannedRow]
    chunk_rows: Sequence[int]
    block_size: int
    group: int  # query heads that share a KV head

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(len(row.token_ids) for row in self.chunks)

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.chunks)

    def tiles(self) -> Int32s:
        """[num_tiles, 4]."""
        if not self.chunks:
            return np.empty((0, 4), np.int32)
        q_lens = [len(row.token_ids) for row in self.chunks]
        firsts = np.cumsum([len(self.decode_rows), *q_lens])[:-1].tolist()
        tiles: Int32s = make_tiles(
            list(self.chunk_rows), firsts, [row.start for row in self.chunks], q_lens, self.group).numpy()
        return tiles

    def fill(self, parts: FlatParts, tiles: Int32s) -> None:
        """Everything, padding included."""
        num_decode = len(self.decode_rows)
        parts.codes[:num_decode] = -1 - self.decode_rows
        parts.positions[:num_decode] = 0
        parts.slots[:num_decode] = -1
        parts.decode_rows[:num_decode] = parts.drawing[:num_decode] = self.decode_rows
        parts.selected[:num_decode] = np.arange(num_decode)
        first, num_drawing = num_decode, num_decode
        for row, at in zip(self.chunks, self.chunk_rows, strict=True):
            end = first + len(row.token_ids)
            self._fill_chunk(parts, row, at, slice(first, end))
            if row.samples:
                parts.drawing[num_drawing], parts.selected[num_drawing] = at, end - 1
                num_drawing += 1
            first = end
        parts.codes[first:] = parts.positions[first:] = 0
        parts.slots[first:] = -1
        parts.decode_rows[num_decode:] = -1
        parts.drawing[num_drawing:] = -1
        parts.selected[num_drawing:] = 0
        parts.tiles[: tiles.size] = tiles.ravel()
        parts.tiles[tiles.size :] = 0

    def _fill_chunk(self, parts: FlatParts, row: PlannedRow, at: int, where: slice) -> None:
        size = self.block_size
        positions = np.arange(row.start, row.start + len(row.token_ids))
        first_block = row.start // size
        blocks = np.asarray(row.block_ids[first_block : int(positions[-1]) // size + 1])
        parts.codes[where] = np.asarray(row.token_ids)
        if row.token_ids[0] == UNKNOWN_TOKEN:
            parts.codes[where.start] = -1 - at
        parts.positions[where] = positions
        parts.slots[where] = blocks[positions // size - first_block] * size + positions % size


def sampled_rows(num_decode: int, chunks: Sequence[PlannedRow]) -> list[int]:
    """Indices of the plan's rows that draw, in the order of `FlatParts.drawing`."""
    return [*range(num_decode), *(num_decode + i for i, row in enumerate(chunks) if row.samples)]


def rows_of(names: Sequence[str], row_of: Mapping[str, int]) -> Int32s:
    return np.fromiter(map(row_of.__getitem__, names), np.int32, len(names))
