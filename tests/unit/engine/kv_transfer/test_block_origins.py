from __future__ import annotations

from collections.abc import Iterator

import pytest

from common import trace
from common.block_hash import BlockHash
from common.span import RecordedSpan
from engine.kv_transfer import block_origins
from engine.kv_transfer.block_origins import BlockOrigins


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


@pytest.fixture
def recorded() -> Iterator[list[RecordedSpan]]:
    spans: list[RecordedSpan] = []
    trace.record_to(spans.append)
    yield spans
    trace.record_to(None)


def test_blocks_that_follow_a_noted_one_have_its_origin(recorded: list[RecordedSpan]) -> None:
    origins = BlockOrigins()
    with trace.root("POST") as asked:
        origins.note([block(1), block(2)])
    assert origins.of([block(2)], block(1)) is asked.context
    assert origins.of([block(3), block(4)], block(2)) is asked.context, "blocks of the answer"
    assert origins.of([block(5)], block(4)) is asked.context
    assert origins.of([block(9)], block(8)) is None


def test_nothing_is_noted_outside_a_recorded_trace(recorded: list[RecordedSpan]) -> None:
    origins = BlockOrigins()
    origins.note([block(1)])
    assert origins.of([block(1)], block(0)) is None


def test_the_oldest_are_forgotten(recorded: list[RecordedSpan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_origins, "MAX_BLOCKS", 3)
    origins = BlockOrigins()
    with trace.root("POST"):
        origins.note([block(n) for n in range(5)])
    assert [origins.of([block(n)], block(99)) is None for n in range(5)] == [True, True, False, False, False]
