"""The running requests that have one pending token, in columns: a step is a few operations on whole columns.

    running, one pending token ──add──▶ member ──finish, abort, preempt──▶ removed

Place i of every column belongs to the request whose `seat` is i; the last one takes the seat of one that is removed.
Each step takes one token of every member, draws one, and leaves one pending again. So between steps a member has
`length - 1` computed tokens, and the columns hold nothing that is not in the requests. A persistent batch that
follows its members, instead of one built anew in each step, is vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from common.sampling_params import SamplingParams
from engine.outputs import RequestOutput
from engine.request import Request
from engine.step import PlannedRow

_LENGTH, _PROMPT, _CACHED, _LIMIT = range(4)  # columns of `_counts`: tokens known, of prompt, cached, known at the end
_last_token = itemgetter(-1)
_block_ids = attrgetter("block_ids")


class DecodeSet:
    """At most `capacity` members. Watches for `eos_token_ids` and the members' own stop tokens."""

    def __init__(self, capacity: int, block_size: int, eos_token_ids: frozenset[int]) -> None:
        self._block_size = block_size
        self._eos = eos_token_ids
        self._watched = set(eos_token_ids)  # stop tokens of members, or of earlier ones since the set was last empty
        self._requests: list[Request] = []
        self._ids: list[str] = []
        self._tokens: list[list[int]] = []  # the requests' own lists
        self._params: list[SamplingParams] = []
        self._queue_s: list[float] = []
        self._columns: tuple[list[Any], ...] = (self._requests, self._ids, self._tokens, self._params, self._queue_s)
        self._counts = np.zeros((4, capacity), np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, max_tokens: int) -> None:
        """Take in an admitted request with one pending token that ends when `max_tokens` of its tokens are known."""
        request.seat = seat = len(self._requests)
        self._requests.append(request)
        self._ids.append(request.request_id)
        self._tokens.append(request.token_ids)
        self._params.append(request.params)
        self._queue_s.append(request.queue_s)
        self._counts[:, seat] = request.num_tokens, request.num_prompt_tokens, request.num_cached_tokens, max_tokens
        self._watched.update(request.params.stop_token_ids)

    def remove(self, request: Request) -> None:
        seat, last = request.seat, len(self._requests) - 1
        self._requests[last].seat = seat
        request.seat = -1
        self._counts[:, seat] = self._counts[:, last]
        for column in self._columns:
            column[seat] = column[last]
            column.pop()
        if not last:
            self._watched = set(self._eos)

    def at_block_end(self) -> list[Request]:
        """Members whose computed tokens are whole blocks: the last one has just been filled, the next one is needed."""
        lengths = self._counts[_LENGTH, : len(self)]
        return [self._requests[seat] for seat in np.flatnonzero((lengths - 1) % self._block_size == 0)]

    def rows(self) -> list[PlannedRow]:
        """Every member's pending token, by seat."""
        counts = self._counts[:, : len(self)]
        starts, output_positions = counts[_LENGTH] - 1, counts[_LENGTH] - counts[_PROMPT]
        return PlannedRow.of_columns(
            self._ids, zip(map(_last_token, self._tokens), strict=False), starts.tolist(),
            map(_block_ids, self._requests), repeat(True), output_positions.tolist(), self._params)

    def advance(self, token_ids: Sequence[int]) -> list[RequestOutput]:
        """The pending tokens are computed and `token_ids`, by seat, were drawn; the outputs, by seat."""
        for tokens, token_id in zip(self._tokens, token_ids, strict=True):
            tokens.append(token_id)
        counts = self._counts[:, : len(self)]
        counts[_LENGTH] += 1
        num_outputs, num_computed = counts[_LENGTH] - counts[_PROMPT], counts[_LENGTH] - 1
        nothing = repeat(None)
        return RequestOutput.of_columns(
            self._ids, zip(token_ids, strict=False), nothing, nothing, counts[_PROMPT].tolist(),
            counts[_CACHED].tolist(), num_outputs.tolist(), nothing, self._queue_s, num_computed.tolist())

    def may_end(self, token_ids: Sequence[int]) -> list[Request]:
        """After `advance`: at least all members that end with the token they just drew."""
        counts = self._counts[:, : len(self)]
        seats = set(np.flatnonzero(counts[_LENGTH] >= counts[_LIMIT]).tolist())
        if not self._watched.isdisjoint(token_ids):
            seats.update(seat for seat, token_id in enumerate(token_ids) if token_id in self._watched)
        return [self._requests[seat] for seat in seats]
