"""The link to a tokenizer replica: what becomes of an ask when its caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from common.clients.text_link import TextLink
from proto import tokenizer_pb2, tokenizer_pb2_grpc


class ReplicaThatAnswersAsTheCallerLeaves:
    """Its first answer and the cancellation of `asking` come in one turn of the event loop."""

    asking: asyncio.Task[Any]

    def Detokenize(self, batches: AsyncIterator[tokenizer_pb2.DetokenizeBatch]) -> Any:  # noqa: N802
        self._batches = batches
        return self

    async def __aiter__(self) -> AsyncIterator[tokenizer_pb2.TextBatch]:
        async for batch in self._batches:
            yield tokenizer_pb2.TextBatch(items=[tokenizer_pb2.TextItem(stream_id=batch.items[0].stream_id)])
            self.asking.cancel()

    def cancel(self) -> None:
        """The link is closed."""


async def test_a_cancellation_is_not_lost_when_the_answer_comes_in_the_same_turn() -> None:
    """B14: a request whose client had left went on to its last token."""
    replica = ReplicaThatAnswersAsTheCallerLeaves()
    link = TextLink(cast(tokenizer_pb2_grpc.TokenizerStub, replica))
    item = tokenizer_pb2.DetokenizeItem(stream_id=link.new_stream_id())
    replica.asking = asyncio.create_task(link.ask(item, 5, silence_is_stall=False))
    with pytest.raises(asyncio.CancelledError):
        await replica.asking
    link.close()
