"""Which captured step a plan gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.gpu.decode_graph import decode_sizes, least_holding
from engine.gpu.extend_graph import extend_shapes, least_fitting


def graphs(max_num_seqs: int = 256, budget: int = 8192) -> list[Any]:
    return [SimpleNamespace(layout=SimpleNamespace(num_tokens=tokens, num_rows=rows), num_decode=num_decode)
            for tokens, rows, num_decode in extend_shapes(max_num_seqs, budget)]


def shape(found: Any) -> tuple[int, int, int] | None:
    return None if found is None else (found.layout.num_tokens, found.layout.num_rows, found.num_decode)


@pytest.mark.parametrize("limit", [1, 3, 8, 100, 256, 300, 1000])
def test_decode_graphs_end_at_the_largest_batch(limit: int) -> None:
    sizes = decode_sizes(limit)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == limit


def test_a_decode_step_takes_the_least_graph_that_holds_its_rows() -> None:
    held: list[Any] = [SimpleNamespace(size=size) for size in decode_sizes(40)]
    assert [least_holding(held, num).size for num in (1, 3, 9, 33, 40)] == [1, 4, 16, 40, 40]  # type: ignore[union-attr]
    assert least_holding(held, 41) is None


@pytest.mark.parametrize(("tokens", "rows", "decoding", "wanted"), [
    (40, 1, 0, (64, 16, 0)),  # a prompt alone
    (65, 1, 0, (128, 16, 0)),
    (64, 17, 0, (64, 64, 64)),  # more prompts than the graphs without decode rows take
    (40, 5, 4, (64, 64, 64)),  # the one without decode rows would leave these out
    (300, 40, 39, (384, 64, 64)),
    (300, 101, 100, (384, 256, 256)),
    (2048, 256, 255, (2048, 256, 256)),
    (2049, 1, 0, None)])
def test_a_step_with_chunks_takes_the_least_graph_that_holds_its_tokens_and_rows(
    tokens: int, rows: int, decoding: int, wanted: tuple[int, int, int] | None
) -> None:
    assert shape(least_fitting(graphs(), tokens, rows, decoding)) == wanted


def test_small_engines_have_no_graphs_beyond_their_budget_and_rows() -> None:
    assert {tokens for tokens, *_ in extend_shapes(6, 200)} == {64, 128, 192}
    assert max(rows for _, rows, _ in extend_shapes(6, 200)) == 6
