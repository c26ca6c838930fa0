"""The contract between deciding and computing: one `StepPlan` goes in, one `StepResult` comes out.

The scheduler fills a plan, a `Runner` executes it. A row is some consecutive tokens of one request: there
are no prefill and decode rows, only more or fewer tokens. As there are many rows of a single token, they come in
columns. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, Protocol

from common.sampling_params import SamplingParams


class PlannedRow(NamedTuple):
    """The tokens of one request that one step computes: positions `start .. start + len(token_ids) - 1`."""

    request_id: str
    token_ids: Sequence[int]  # at least one
    start: int  # = num_computed_tokens before the step
    block_ids: Sequence[int]  # the whole block table; covers start + len(token_ids) slots
    samples: bool  # draw the next token from the last position's logits
    output_position: int  # index of that drawn token among the request's outputs; counts on after preemption
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token that sample. Place i of every column is row i; see `PlannedRow` for their meaning."""

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    starts: Sequence[int] = ()
    block_ids: Sequence[Sequence[int]] = ()
    output_positions: Sequence[int] = ()
    params: Sequence[SamplingParams] = ()

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True)
class StepPlan:
    """One step's work, never changed once made; `num_tokens` is within the budget.

    Row i of the step is row i of `decode`, and after these come the `chunks`.
    """

    step_id: int
    chunks: Sequence[PlannedRow]
    decode: DecodeRows = field(default_factory=DecodeRows)

    @property
    def num_rows(self) -> int:
        return len(self.decode) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(len(row.token_ids) for row in self.chunks)

    @cached_property
    def rows(self) -> Sequence[PlannedRow]:
        """All rows in one form, for runners that go row by row. The first use makes an object for each."""
        decode = self.decode
        columns = zip(
            decode.request_ids, zip(decode.token_ids, strict=False), decode.starts, decode.block_ids, repeat(True),
            decode.output_positions, decode.params, strict=False)
        return [*map(PlannedRow._make, columns), *self.chunks]

    def check(self, result: StepResult) -> None:
        """Raise `ValueError` unless the result has a token for exactly the rows of this plan that sample."""
        if result.step_id != self.step_id or len(result.token_ids) != self.num_rows:
            raise ValueError(
                f"result of step {result.step_id} with {len(result.token_ids)} rows, "
                f"expected step {self.step_id} with {self.num_rows}")
        num_decoded = len(self.decode)
        is_complete = None not in result.token_ids[:num_decoded]
        rows, first = (self.chunks, num_decoded) if is_complete else (self.rows, 0)
        for row, token_id in zip(rows, result.token_ids[first:], strict=True):
            if row.samples != (token_id is not None):
                raise ValueError(f"request {row.request_id}: samples is {row.samples}, but token {token_id} was drawn")


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids[i]` is the token drawn for row i of the plan, or None where the row does not sample."""

    step_id: int
    token_ids: Sequence[int | None]


class Runner(Protocol):
    """Computes plans. Owns the KV bytes; never decides. Raises only when the engine cannot go on."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def block_bytes(self) -> int:
        """The size of one KV block."""

    def block_view(self, block_id: int) -> memoryview:
        """The bytes of one block in place: writable, C-contiguous, exactly `block_bytes`.

        Any thread may take one; who copies through it keeps the block from being given back meanwhile. Raises
        `IndexError` outside the pool.
        """

    def execute(self, plan: StepPlan) -> StepResult: ...

    def forget(self, request_id: str) -> None:
        """The request has ended or was preempted: drop any state kept for it."""
