"""The running requests that have one pending token, in columns: a step is a few operations on whole columns.

    running, one pending token ──add──▶ member ──finish, abort, preempt──▶ removed

Place i of every column belongs to the request whose `seat` is i; the last one takes the seat of one that is removed.
Each step takes one token of every member, draws one, and leaves one pending again. So between steps a member has
`length - 1` computed tokens, and the columns hold nothing that is not in the requests. A persistent batch that
follows its members, instead of one built anew in each step, is vLLM's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from common.sampling_params import SamplingParams
from engine.outputs import RequestOutput
from engine.request import Request
from engine.step import DecodeRows

_LENGTH, _PROMPT, _LIMIT = range(3)  # rows of `_counts`: tokens known now, of the prompt, and known at the end


class DecodeSet:
    """At most `capacity` members. Watches for `eos_token_ids` and the members' own stop tokens."""

    def __init__(self, capacity: int, block_size: int, eos_token_ids: frozenset[int]) -> None:
        self._block_size = block_size
        self._eos = eos_token_ids
        self._watched = set(eos_token_ids)  # stop tokens of members, or of earlier ones since the set was last empty
        self._counts = np.zeros((3, capacity), np.int64)
        self._requests: list[Request] = []
        self._ids: list[str] = []
        self._params: list[SamplingParams] = []
        self._num_prompt: list[int] = []
        self._num_cached: list[int] = []
        self._queue_s: list[float] = []
        self._tokens: list[array[int]] = []  # the requests' own
        self._block_ids: list[tuple[int, ...]] = []
        self._last_tokens: list[int] = []
        self._num_computed: list[int] = []
        self._num_outputs: list[int] = []
        self._columns: tuple[list[Any], ...] = (
            self._requests, self._ids, self._params, self._num_prompt, self._num_cached, self._queue_s, self._tokens,
            self._block_ids, self._last_tokens, self._num_computed, self._num_outputs)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, last_length: int) -> None:
        """Take in an admitted request with one pending token that ends when `last_length` of its tokens are known."""
        request.seat = len(self._requests)
        self._counts[:, request.seat] = request.num_tokens, request.num_prompt_tokens, last_length
        values = (
            request, request.request_id, request.params, request.num_prompt_tokens, request.num_cached_tokens,
            request.queue_s, request.token_ids, request.block_ids, request.token_ids[-1],
            request.num_computed_tokens, request.num_output_tokens)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
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
        return [self._requests[seat] for seat in np.flatnonzero((lengths - 1) % self._block_size == 0).tolist()]

    def rows(self, grown: Iterable[Request]) -> DecodeRows:
        """Every member's pending token, by seat. `grown`: all members whose block table is new since the last call."""
        for request in grown:
            if request.seat >= 0:
                self._block_ids[request.seat] = request.block_ids
        return DecodeRows(
            self._ids.copy(), self._last_tokens.copy(), self._num_computed.copy(), self._block_ids.copy(),
            self._num_outputs.copy(), self._params.copy())

    def advance(self, token_ids: Sequence[int]) -> list[RequestOutput]:
        """The pending tokens are computed and `token_ids`, by seat, were drawn; the outputs, by seat."""
        deque(map(array.append, self._tokens, token_ids), maxlen=0)
        lengths, num_prompt, _ = self._counts[:, : len(self)]
        self._num_computed[:] = lengths.tolist()
        lengths += 1
        self._num_outputs[:] = (lengths - num_prompt).tolist()
        self._last_tokens[:] = token_ids
        nothing = repeat(None)
        return RequestOutput.of_columns(
            self._ids, zip(token_ids, strict=False), nothing, nothing, self._num_prompt, self._num_cached,
            self._num_outputs, nothing, self._queue_s, self._num_computed, repeat(0), repeat(()), repeat(()), nothing)

    def may_end(self, token_ids: Sequence[int]) -> list[Request]:
        """After `advance`: at least all members that end with the token they just drew."""
        lengths, _, limits = self._counts[:, : len(self)]
        seats = set(np.flatnonzero(lengths >= limits).tolist())
        if not self._watched.isdisjoint(token_ids):
            seats.update(seat for seat, token_id in enumerate(token_ids) if token_id in self._watched)
        return [self._requests[seat] for seat in seats]
