"""The unread deltas of one request, between the stream of a worker and the reader of the request.

What has gathered while the reader was busy is read as one delta of each choice, so that a reader that falls behind has
less to do for each token. Only whole deltas are joined: tokens, logprobs and their order stay, the counts are the last.

The stream of a worker is that of many requests and cannot wait for one reader. Token ids are few bytes and bounded by
the max_tokens of the request's choices; of logprobs, which are many, so much waits and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from common.errors import ReaderTooSlow, ShoalError
from common.generation import FinishReason, TokenDelta

MAX_UNREAD_LOGPROBS: Final = 1 << 18  # with alternatives; some 25 MB, or 12,000 tokens with 20 each
_FAILED = (FinishReason.ABORT, FinishReason.ERROR)


class DeltaInbox:
    """One reader. It holds what the reader has not taken; once that is too much, only the error that says so."""

    def __init__(self) -> None:
        self._unread: list[TokenDelta | ShoalError] = []
        self._num_logprobs = 0  # unread
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: TokenDelta | ShoalError) -> bool:
        """False when that was too much: the reader will have an error, and nothing more is to be put."""
        self._unread.append(item)
        if isinstance(item, TokenDelta):
            self._num_logprobs += num_logprobs(item)
        fits = self._num_logprobs <= MAX_UNREAD_LOGPROBS
        if not fits:
            self._unread = [ReaderTooSlow(
                f"the stream is read too slowly: more than {MAX_UNREAD_LOGPROBS} logprobs wait for the reader")]
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return fits

    async def take(self) -> Sequence[TokenDelta | ShoalError]:
        """All that is unread, joined; waits for a first one."""
        if not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        unread, self._unread, self._num_logprobs = self._unread, [], 0
        return joined(unread) if len(unread) > 1 else unread


def num_logprobs(delta: TokenDelta) -> int:
    """Of its output tokens, with their alternatives."""
    return sum(1 + len(entry.top_token_ids) for entry in delta.logprobs)


def joined(items: Sequence[TokenDelta | ShoalError]) -> list[TokenDelta | ShoalError]:
    """One delta of each choice, in the order of their first ones; none is moved past a failure, which stays alone."""
    out: list[TokenDelta | ShoalError] = []
    runs: dict[int, list[TokenDelta]] = {}
    for item in items:
        if isinstance(item, ShoalError) or item.finish_reason in _FAILED:
            out += map(_one, runs.values())
            runs.clear()
            out.append(item)
        else:
            runs.setdefault(item.choice, []).append(item)
    return [*out, *map(_one, runs.values())]


def _one(run: Sequence[TokenDelta]) -> TokenDelta:
    if len(run) == 1:
        return run[0]
    last = run[-1]
    return replace(
        last, token_ids=tuple(chain.from_iterable(delta.token_ids for delta in run)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in run)),
        prompt_logprobs=next((delta.prompt_logprobs for delta in run if delta.prompt_logprobs), ()),
        timing=last.timing or run[0].timing)
