"""Spans of a request that does not end well."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from common import trace
from common.errors import Unavailable
from common.generation import ModelFacts
from common.span import RecordedSpan
from common.tokenized import TextDelta
from gateway.attempts import AttemptLimits
from gateway.order import Order, Piece
from gateway.pipeline import Pipeline, PipelineLimits
from tests.fakes import MODEL, FakeDecode, FakeText, FakeTokenizer, says


class BrokenText(FakeText):
    async def push(self, token_ids: object) -> TextDelta:
        raise Unavailable("the tokenizer is gone")


class WithoutText(FakeText):
    async def push(self, token_ids: object) -> TextDelta:
        return TextDelta("", 0)


class Tokenizer(FakeTokenizer):
    def __init__(self, text: type[FakeText]) -> None:
        super().__init__()
        self._text = text

    def open_text(self, model: str, **_: object) -> FakeText:
        return self._text((), False)


@pytest.fixture
def recorded() -> Iterator[list[RecordedSpan]]:
    spans: list[RecordedSpan] = []
    trace.record_to(spans.append)
    yield spans
    trace.record_to(None)


def pipeline(text: type[FakeText]) -> Pipeline:
    limits = PipelineLimits(AttemptLimits(0.2, 1), 16)
    return Pipeline(Tokenizer(text), FakeDecode(says("hello")), None, limits)


ORDER = Order("r1", ModelFacts(MODEL, 512, 1), "hi", 4)


async def test_the_span_of_detokenizing_ends_with_a_tokenizer_that_fails(recorded: list[RecordedSpan]) -> None:
    with pytest.raises(Unavailable), trace.root("POST"):
        async for _ in pipeline(BrokenText).run(ORDER, asyncio.get_running_loop().time() + 5):
            pass
    (span,) = [span for span in recorded if span.name == "detokenize"]
    assert span.error_type == Unavailable.code


async def test_the_span_of_detokenizing_ends_with_a_client_that_leaves_before_the_first_text(
    recorded: list[RecordedSpan]
) -> None:
    with trace.root("POST"):
        async with aclosing(pipeline(WithoutText).run(ORDER, asyncio.get_running_loop().time() + 5)) as pieces:
            async for piece in pieces:
                assert isinstance(piece, Piece)
                break
    (span,) = [span for span in recorded if span.name == "detokenize"]
    assert span.error_type == "cancelled"
