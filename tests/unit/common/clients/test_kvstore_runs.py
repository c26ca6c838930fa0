from __future__ import annotations

import pytest

from common.clients import kvstore_runs
from common.clients.kvstore_runs import RUN_BLOCKS, ChainRuns, Run

CHAIN = [index.to_bytes(16, "big") for index in range(300)]


def test_a_chain_is_cut_every_128_blocks_from_its_start() -> None:
    assert ChainRuns().cut(CHAIN) == [
        Run(CHAIN[0], 0, 128), Run(CHAIN[128], 128, 256), Run(CHAIN[256], 256, 300)]
    assert ChainRuns().cut([]) == []


@pytest.mark.parametrize("size", [1, 7, 64, 127, 128, 129])
def test_a_chain_put_in_parts_has_the_same_heads_as_in_one_piece(size: int) -> None:
    runs, heads = ChainRuns(), []
    for start in range(0, len(CHAIN), size):
        part = CHAIN[start : start + size]
        for head, first, end in runs.cut(part, CHAIN[start - 1] if start else b"root"):
            heads += [head] * (end - first)
    assert heads == [CHAIN[index // RUN_BLOCKS * RUN_BLOCKS] for index in range(len(CHAIN))]


def test_the_rest_of_a_known_chain_keeps_its_heads() -> None:
    runs = ChainRuns()
    runs.cut(CHAIN, from_start=True)
    assert runs.cut(CHAIN[200:]) == [Run(CHAIN[128], 0, 56), Run(CHAIN[256], 56, 100)]


def test_a_wrong_guess_is_corrected_when_the_chain_is_seen_from_its_start() -> None:
    runs = ChainRuns()
    assert runs.cut(CHAIN[100:110], CHAIN[99])[0].head == CHAIN[100]
    runs.cut(CHAIN[:120], from_start=True)
    assert runs.cut(CHAIN[100:110], CHAIN[99])[0].head == CHAIN[0]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvstore_runs, "MAX_REMEMBERED", 10)
    runs = ChainRuns()
    runs.cut(CHAIN)
    assert len(runs._places) == 10
