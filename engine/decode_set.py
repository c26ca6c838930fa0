"""The running sequences that have one token to plan, in columns: a step is a few operations on whole columns.

    running, one token to plan ──add──▶ member ──finish, abort, preempt, its last row planned──▶ removed

Place i of every column belongs to the sequence whose `seat` is i; the last one takes the seat of one that is removed.
Each plan has a row for every member: the token at `start`, whose KV the row computes. It is known, or it is the one
that a launched step is drawing. Once planned, the next token to plan is the one that this row draws. A member whose
next token is surely its last leaves with the plan of that row, so only a stop costs a row that nobody needs.

What a plan names of its members (`Members`) is made once and shared by all plans until a member comes or goes. A
persistent batch that follows its members, instead of one built anew in each step, is vLLM's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.sampling_params import SamplingParams
from engine.outputs import RequestOutput
from engine.request import Request
from engine.step import UNKNOWN_TOKEN, DecodeRows

Int64s = NDArray[np.int64]
_STARTS, _KNOWN, _PROMPT, _LIMIT = range(4)  # rows of `_counts`
_NUM_COLUMNS = 9  # the lists of `Members`
_COMMIT_TOKENS = 64  # running answers make their blocks public this many tokens at a time, for hashing costs per call
_NOTHING: repeat[None] = repeat(None)
_EMPTY: repeat[tuple[()]] = repeat(())


@dataclass(frozen=True, slots=True)
class Members:
    """Columns of one membership, by row; never changed."""

    requests: list[Request]
    sequence_ids: list[str]
    request_ids: list[str]
    choices: list[int]
    params: list[SamplingParams]
    num_prompt: list[int]
    num_cached: list[int]
    queue_s: list[float]
    tokens: list[array[int]]  # the sequences' own
    num_prompt_column: Int64s
    constrained: tuple[int, ...]  # rows whose sequence has a grammar


class DecodePart(NamedTuple):
    """The decode rows of one plan, as they are needed when its result comes."""

    members: Members
    starts: Int64s


class TakenRows(NamedTuple):
    """What `DecodeSet.take` did. Rows in none of the lists but `outputs` need nothing more."""

    outputs: list[RequestOutput]  # one for each row; of no meaning for strays
    strays: list[int]  # rows whose sequence is not a member now, or knows the token: nothing was done
    to_commit: list[int]  # rows that filled blocks which should be made public now
    may_end: list[int]  # rows that drew a watched token


class DecodeSet:
    """At most `capacity` members. Watches for `eos_token_ids` and the members' own stop tokens."""

    def __init__(self, capacity: int, block_size: int, eos_token_ids: frozenset[int]) -> None:
        self._block_size = block_size
        self._commit_size = block_size * max(1, _COMMIT_TOKENS // block_size)
        self._eos = eos_token_ids
        self._watched = set(eos_token_ids)  # stop tokens of members, or of earlier ones since the set was last empty
        self._counts = np.zeros((4, capacity), np.int64)
        self._columns: tuple[list[Any], ...] = tuple([] for _ in range(_NUM_COLUMNS))
        self._requests: list[Request] = self._columns[0]
        self._tables: list[tuple[int, ...]] = []
        self._num_constrained = 0
        self._planned_tables: Sequence[tuple[int, ...]] | None = None  # as the newest plan has them, while unchanged
        self._members: Members | None = None  # while unchanged

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, last_length: int) -> None:
        """Take in a sequence with blocks for all its planned tokens that ends when `last_length` tokens are known."""
        seat = request.seat = len(self._requests)
        self._counts[:, seat] = (
            request.num_planned_tokens, request.num_tokens, request.num_prompt_tokens, last_length)
        values = (
            request, request.sequence_id, request.request_id, request.choice, request.params,
            request.num_prompt_tokens, request.num_cached_tokens, request.queue_s, request.token_ids)
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)
        self._tables.append(request.block_ids)
        self._num_constrained += request.grammar is not None
        self._watched.update(request.params.stop_token_ids)
        self._members = self._planned_tables = None

    def remove(self, request: Request) -> None:
        seat, last = request.seat, len(self._requests) - 1
        request.num_planned_tokens = int(self._counts[_STARTS, seat])
        self._requests[last].seat = seat
        request.seat = -1
        self._counts[:, seat] = self._counts[:, last]
        for column in (*self._columns, self._tables):
            column[seat] = column[last]
            column.pop()
        self._num_constrained -= request.grammar is not None
        self._members = self._planned_tables = None
        if not last:
            self._watched = set(self._eos)

    def learn(self, request: Request) -> None:
        """The sequence has taken in its newest token by itself."""
        self._counts[_KNOWN, request.seat] = request.num_tokens

    def at_block_end(self) -> list[Request]:
        """Members whose planned tokens fill their blocks: the next row needs a new one."""
        starts = self._counts[_STARTS, : len(self)]
        requests = self._requests
        return [requests[seat] for seat in np.flatnonzero(starts % self._block_size == 0).tolist()]

    def update_table(self, request: Request) -> None:
        """The block table of a member has grown."""
        self._tables[request.seat] = request.block_ids
        self._planned_tables = None

    def plan(self) -> tuple[DecodeRows, DecodePart]:
        """The next token of every member. Remove `drained` next."""
        members = self._members = self._members or self._snapshot()
        if self._planned_tables is None:
            self._planned_tables = self._tables.copy()
        starts, known, prompt, _ = self._counts[:, : len(self)]
        planned = starts.copy()
        token_ids = [UNKNOWN_TOKEN] * len(self)
        for row in np.flatnonzero(known > planned).tolist():
            token_ids[row] = members.tokens[row][-1]
        starts += 1
        rows = DecodeRows(
            members.sequence_ids, token_ids, array("q", planned.tobytes()), self._planned_tables,
            array("q", (starts - prompt).tobytes()), members.params)
        return rows, DecodePart(members, planned)

    def drained(self) -> list[Request]:
        """Members whose last token is being drawn."""
        starts, _, _, limits = self._counts[:, : len(self)]
        return [self._requests[seat] for seat in np.flatnonzero(starts + 1 >= limits).tolist()]

    def take(self, part: DecodePart, token_ids: list[int]) -> TakenRows:
        """A step has retired that drew `token_ids`, by row: the members know them now."""
        members, starts = part
        lengths = starts + 2  # once the row's token is known
        strays: list[int] = []
        is_due: list[bool] | None = None
        if members is self._members:
            self._counts[_KNOWN, : len(self)] = lengths
            deque(map(array.append, members.tokens, token_ids), maxlen=0)
        else:
            due = self._learn_due(members, starts, token_ids)
            is_due = due.tolist()
            strays = np.flatnonzero(~due).tolist()
        filled = (starts + 1) % self._commit_size == 0
        may_end: list[int] = []
        if not self._watched.isdisjoint(token_ids):
            may_end = [row for row, token_id in enumerate(token_ids) if token_id in self._watched]
        if is_due is not None:
            filled &= is_due
            may_end = [row for row in may_end if is_due[row]]
        outputs = RequestOutput.of_columns(
            members.request_ids, zip(token_ids, strict=False), _NOTHING, _NOTHING, members.num_prompt,
            members.num_cached, (lengths - members.num_prompt_column).tolist(), _NOTHING, members.queue_s,
            (starts + 1).tolist(), members.choices, _EMPTY, _EMPTY, _NOTHING)
        return TakenRows(outputs, strays, np.flatnonzero(filled).tolist(), may_end)

    def _learn_due(self, members: Members, starts: Int64s, token_ids: list[int]) -> NDArray[np.bool_]:
        """Rows of sequences that are members and lack the token; these know it afterwards."""
        seats = np.fromiter((request.seat for request in members.requests), np.int64, len(starts))
        due = seats >= 0
        due[due] = self._counts[_KNOWN, seats[due]] == starts[due] + 1
        self._counts[_KNOWN, seats[due]] = starts[due] + 2
        deque(map(array.append, compress(members.tokens, due), compress(token_ids, due)), maxlen=0)
        return due

    def _snapshot(self) -> Members:
        constrained: tuple[int, ...] = ()
        if self._num_constrained:
            constrained = tuple(row for row, request in enumerate(self._requests) if request.grammar is not None)
        columns: Any = [column.copy() for column in self._columns]
        columns += [self._counts[_PROMPT, : len(self)].copy(), constrained]
        return Members(*columns)
