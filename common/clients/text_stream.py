"""The text of one choice, over whichever tokenizer replica lives.

States of a `ReplicaTextStream`: detached → attached (the replica knows it by a stream id) ⇄ detached (link broken,
or an answer given up) → ended (finished, at a stop string, or by an error that a repeat cannot help) → closed,
from every state. The stream keeps all its tokens and how many characters it has given out. When it attaches again it
opens with all tokens and skips that much text; detokenizing is a pure function of (opening, tokens), so nothing is
lost or repeated.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from common import rpc
from common.clients.text_link import TextLink
from common.errors import Cancelled, Overloaded, Unavailable
from common.tokenized import TextDelta
from proto import tokenizer_pb2

if TYPE_CHECKING:
    from common.clients.tokenizer_replicas import Replica, TokenizerReplicas


FULL_WAIT_S: Final = 0.1  # when all replicas are full; doubles up to
MAX_FULL_WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Attachment:
    replica: Replica
    link: TextLink
    stream_id: int


class ReplicaTextStream:
    """`common.tokenized.TextStream`. One push or finish at a time."""

    def __init__(
        self, replicas: TokenizerReplicas, opening: tokenizer_pb2.DetokenizeOpen, timeout_s: float,
        attempt_timeout_s: float,
    ) -> None:
        self._replicas, self._opening = replicas, opening
        self._timeout_s, self._attempt_timeout_s = timeout_s, attempt_timeout_s
        self._tokens = array("I")
        self._num_chars = 0  # given out
        self._last = TextDelta("", 0)
        self._attached: _Attachment | None = None
        self._closed = False

    async def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Raises `Unavailable` when no replica answers within the deadline, `Overloaded` when those that do are full.

        The tokens are kept.
        """
        return await self._advance(token_ids, flush=False)

    async def finish(self, token_ids: Sequence[int] = ()) -> TextDelta:
        return await self._advance(token_ids, flush=True)

    def close(self) -> None:
        self._closed = True
        self._detach()
        del self._tokens[:]

    async def _advance(self, token_ids: Sequence[int], *, flush: bool) -> TextDelta:
        if self._closed:
            raise Cancelled("the text stream is closed")
        if self._last.finished:
            return replace(self._last, text="")
        self._tokens.extend(token_ids)
        deadline = time.monotonic() + self._timeout_s
        full: set[str] = set()  # replicas that had no room
        wait_s = FULL_WAIT_S
        while True:
            fresh = self._attached is None or self._attached.link.broken
            at = await self._attach(deadline, full) if self._attached is None or fresh else self._attached
            item = tokenizer_pb2.DetokenizeItem(
                stream_id=at.stream_id, open=self._opening if fresh else None,
                token_ids=self._tokens if fresh else token_ids, flush=flush)
            try:
                return self._received(await self._ask(at, item, deadline), self._num_chars if fresh else 0)
            except Overloaded:
                full.add(at.replica.address)
                if self._replicas.has_other(self._opening.model, full):
                    continue
                if time.monotonic() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)
                full.clear()
                wait_s = min(2 * wait_s, MAX_FULL_WAIT_S)
            except Unavailable:
                self._replicas.mark_failed(at.replica)
                if time.monotonic() >= deadline:
                    raise

    async def _ask(
        self, at: _Attachment, item: tokenizer_pb2.DetokenizeItem, deadline: float
    ) -> tokenizer_pb2.TextItem:
        """One try. However it fails, the replica forgets the stream id and the next try opens again."""
        answered = False
        left = max(deadline - time.monotonic(), 0.001)
        try:
            answer = await at.link.ask(
                item, min(self._attempt_timeout_s, left), silence_is_stall=left >= self._attempt_timeout_s)
            if answer.HasField("error"):
                raise rpc.error_from_proto(answer.error)
            answered = True
            return answer
        finally:
            if not answered:
                self._detach()

    def _received(self, item: tokenizer_pb2.TextItem, num_known_chars: int) -> TextDelta:
        """`num_known_chars` of the text were given out before."""
        text = item.text[num_known_chars:]
        self._num_chars += len(text)
        self._last = TextDelta(
            text, item.num_tokens, item.matched_stop if item.HasField("matched_stop") else None, item.finished)
        if item.finished:  # the replica has forgotten it already
            self._attached = None
            del self._tokens[:]
        return self._last

    async def _attach(self, deadline: float, full: Collection[str]) -> _Attachment:
        replica = await self._replicas.pick(self._opening.model, deadline, full)
        if self._closed:
            raise Cancelled("the text stream is closed")
        link = replica.link()
        self._attached = _Attachment(replica, link, link.new_stream_id())
        return self._attached

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.link.forget(self._attached.stream_id)
            self._attached = None
