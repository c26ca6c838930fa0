"""One long Detokenize stream to one tokenizer replica, shared by all texts of this process.

States of a `TextLink`: open → broken (the stream ended, whoever ended it). Asks of one turn of the event loop travel as
one message. Every ask gets the answer of its stream id, or `Unavailable` when the link breaks. A text has at most one
ask on its way, so the queue is bounded by the number of texts; closing notes are bounded by the same.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from collections.abc import AsyncIterator
from typing import Final

import grpc.aio

from common import rpc
from common.errors import ShoalError, Unavailable
from proto import tokenizer_pb2, tokenizer_pb2_grpc

MAX_BATCH_TOKENS: Final = 1 << 18  # far below the message limit, also when every text opens again at once


class TextLink:
    """Connects by itself; a link that cannot connect is broken."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerStub) -> None:
        self._stub = stub
        self._ids = itertools.count(1)
        self._outbox: list[tokenizer_pb2.DetokenizeItem] = []
        self._filled = asyncio.Event()
        self._asks: dict[int, asyncio.Future[tokenizer_pb2.TextItem]] = {}
        self.broken = False
        # An empty context: the stream belongs to no single request and must not carry one's trace.
        self._task = asyncio.create_task(self._run(), context=contextvars.Context())

    def new_stream_id(self) -> int:
        return next(self._ids)

    async def ask(
        self, item: tokenizer_pb2.DetokenizeItem, timeout_s: float, *, silence_is_stall: bool
    ) -> tokenizer_pb2.TextItem:
        """The answer to `item`. Raises `Unavailable` when the link breaks or the replica is silent for `timeout_s`.

        With `silence_is_stall` such silence breaks the link, for all texts alike.
        """
        if self.broken:
            raise Unavailable("the text stream to the tokenizer has ended")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tokenizer_pb2.TextItem] = loop.create_future()
        self._asks[item.stream_id] = answer
        timer = loop.call_later(timeout_s, _expire, answer)  # one ask a token: cheaper than `asyncio.timeout`
        self._send(item)
        try:
            return await answer
        except TimeoutError:
            if silence_is_stall:
                self.close()
            raise Unavailable(f"the tokenizer did not answer within {timeout_s:g} s") from None
        finally:
            timer.cancel()
            self._asks.pop(item.stream_id, None)

    def forget(self, stream_id: int) -> None:
        """Tell the replica to drop the stream id."""
        if not self.broken:
            self._send(tokenizer_pb2.DetokenizeItem(stream_id=stream_id, close=True))

    def close(self) -> None:
        self._break(Unavailable("the text stream to the tokenizer was closed"))
        self._task.cancel()

    def _send(self, item: tokenizer_pb2.DetokenizeItem) -> None:
        self._outbox.append(item)
        self._filled.set()

    async def _run(self) -> None:
        why: ShoalError = Unavailable("the tokenizer ended the text stream")
        call = None
        try:
            call = self._stub.Detokenize(self._batches())
            async for batch in call:
                for item in batch.items:
                    answer = self._asks.get(item.stream_id)
                    if answer is not None and not answer.done():
                        answer.set_result(item)
        except grpc.aio.AioRpcError as error:
            why = rpc.error_from_rpc(error)
        except grpc.aio.UsageError:  # the channel is closed already
            why = Unavailable("the channel to the tokenizer was closed")
        finally:
            self._break(why)
            if call is not None:
                call.cancel()

    async def _batches(self) -> AsyncIterator[tokenizer_pb2.DetokenizeBatch]:
        while True:
            await self._filled.wait()
            if self.broken:
                return
            yield self._take_batch()

    def _take_batch(self) -> tokenizer_pb2.DetokenizeBatch:
        num_tokens = taken = 0
        for item in self._outbox:
            if taken and num_tokens + len(item.token_ids) > MAX_BATCH_TOKENS:
                break
            num_tokens += len(item.token_ids)
            taken += 1
        batch = tokenizer_pb2.DetokenizeBatch(items=self._outbox[:taken])
        del self._outbox[:taken]
        if not self._outbox:
            self._filled.clear()
        return batch

    def _break(self, why: ShoalError) -> None:
        self.broken = True
        self._outbox.clear()
        self._filled.set()  # ends `_batches`
        for answer in self._asks.values():
            if not answer.done():
                answer.set_exception(Unavailable(why.message, retry_after_s=1.0))


def _expire(answer: asyncio.Future[tokenizer_pb2.TextItem]) -> None:
    if not answer.done():
        answer.set_exception(TimeoutError())
