"""What decode rows of consecutive plans tell the device, and what they need not tell again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.sampling_params import SamplingParams
from engine.gpu.decode_columns import DecodeColumns
from engine.gpu.host_draw import is_plain
from engine.step import UNKNOWN_TOKEN, DecodeRows

ROW_OF = {"a": 4, "b": 2, "c": 9}
NAMES = ["a", "b", "c"]
TABLES: list[tuple[int, ...]] = [(1,), (2,), (3,)]


class Told:
    """Notes what a `DeviceRows` would be told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def set_table(self, row: int, block_ids: Sequence[int]) -> None:
        self.calls.append(("table", row, tuple(block_ids)))

    def place_all(self, rows: Any, tokens: list[int], computed: list[int], positions: list[int]) -> None:
        self.calls.append(("place", rows.tolist(), tokens, computed, positions))


def rows(tables: Any = TABLES, tokens: Sequence[int] = (UNKNOWN_TOKEN,) * 3, names: Any = NAMES,
         params: SamplingParams | None = None, position: int = 1) -> DecodeRows:
    held = params or SamplingParams(max_tokens=9)
    return DecodeRows(names, list(tokens), [7, 8, 9], tables, [position] * 3, [held] * 3)


def told(columns: DecodeColumns, decode: DecodeRows) -> tuple[bool, list[tuple[Any, ...]]]:
    state = Told()
    return columns.take(decode, ROW_OF, state), state.calls  # type: ignore[arg-type]


def test_a_new_membership_tells_every_table_and_the_next_step_nothing() -> None:
    columns = DecodeColumns(is_plain)
    assert told(columns, rows()) == (True, [("table", 4, (1,)), ("table", 2, (2,)), ("table", 9, (3,))])
    first = columns.rows
    assert told(columns, rows()) == (True, [])
    assert columns.rows is first


def test_only_a_table_that_has_grown_is_told() -> None:
    columns = DecodeColumns(is_plain)
    told(columns, rows())
    assert told(columns, rows(tables=[TABLES[0], (2, 5), TABLES[2]]))[1] == [("table", 2, (2, 5))]


def test_a_token_that_the_host_knows_is_placed_with_all_that_goes_with_it() -> None:
    columns = DecodeColumns(is_plain)
    told(columns, rows())
    assert told(columns, rows(tokens=(UNKNOWN_TOKEN, 55, UNKNOWN_TOKEN)))[1] == [("place", [2], [55], [8], [1])]


def test_after_a_sequence_has_come_or_gone_the_same_names_are_looked_up_again() -> None:
    columns = DecodeColumns(is_plain)
    told(columns, rows())
    columns.invalidate()
    assert len(told(columns, rows())[1]) == 3


def test_rows_are_plain_by_their_parameters_and_once_the_least_number_is_drawn() -> None:
    def plain(params: SamplingParams, position: int = 1) -> bool:
        return told(DecodeColumns(is_plain), rows(params=params, position=position))[0]

    assert not plain(SamplingParams(max_tokens=9, top_p=0.5))
    assert plain(SamplingParams(max_tokens=9, temperature=0.0, top_p=0.5))
    assert not plain(SamplingParams(max_tokens=9, min_tokens=3), position=2)
    assert plain(SamplingParams(max_tokens=9, min_tokens=3), position=3)
