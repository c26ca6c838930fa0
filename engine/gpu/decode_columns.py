"""What the decode rows of consecutive plans share, worked out once for each membership.

The decode set gives the same `request_ids` and `params` lists to every plan until a member comes or goes, and the same
list of block tables until one grows. So a step of many rows costs the host a few comparisons of identity.

States: stale (at first, after `invalidate`) → of one membership (`take`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from common.sampling_params import SamplingParams
from engine.gpu.device_rows import DeviceRows
from engine.gpu.flat_inputs import rows_of
from engine.step import UNKNOWN_TOKEN, DecodeRows

IsPlain = Callable[[SamplingParams], bool]  # whether a draw needs no more than the temperature, by its parameters


class DecodeColumns:
    """`rows` [num_decode] int32: the device's row of each decode row; the same object while nothing has changed."""

    def __init__(self, is_plain: IsPlain) -> None:
        self._is_plain_for = is_plain
        self.rows: NDArray[np.int32] = np.empty(0, np.int32)
        self._names: Sequence[str] | None = None
        self._tables: Sequence[Sequence[int]] = ()
        self._is_plain = True
        self._least: list[tuple[int, int]] = []  # (row, min_tokens) where there is such a demand

    def invalidate(self) -> None:
        """A sequence has come or gone."""
        self._names = None

    def take(self, decode: DecodeRows, row_of: Mapping[str, int], state: DeviceRows) -> bool:
        """Stage what the device does not know of these rows; whether all their draws are plain."""
        if decode.request_ids is self._names:
            if decode.block_ids is not self._tables:
                for row, old, new in zip(self._row_list, self._tables, decode.block_ids, strict=True):
                    if old is not new:
                        state.set_table(row, new)
        else:
            self._remember(decode, row_of)
            for row, table in zip(self._row_list, decode.block_ids, strict=True):
                state.set_table(row, table)
        self._tables = decode.block_ids
        self._place(decode, state)
        return self._is_plain and all(decode.output_positions[i] >= least for i, least in self._least)

    def _remember(self, decode: DecodeRows, row_of: Mapping[str, int]) -> None:
        self._names = decode.request_ids
        self.rows = rows_of(decode.request_ids, row_of)
        self._row_list: list[int] = self.rows.tolist()
        self._is_plain = all(map(self._is_plain_for, decode.params))
        self._least = [(i, params.min_tokens) for i, params in enumerate(decode.params) if params.min_tokens]

    def _place(self, decode: DecodeRows, state: DeviceRows) -> None:
        """A token that is known was drawn by a step that has been collected, or elsewhere: no launched step has it."""
        tokens = decode.token_ids
        num_unknown = tokens.count(UNKNOWN_TOKEN)
        if num_unknown == len(tokens):
            return
        known = [i for i, token in enumerate(tokens) if token != UNKNOWN_TOKEN]
        state.place_all(self.rows[known], [tokens[i] for i in known], [decode.starts[i] for i in known],
                        [decode.output_positions[i] for i in known])
