"""The contract between deciding and computing: one `StepPlan` goes in, one `StepResult` comes out.

The scheduler fills a plan, a `Runner` executes it. A row is some consecutive tokens of one request; there
are no prefill and decode rows, only more or fewer tokens. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from common.sampling_params import SamplingParams


class PlannedRow(NamedTuple):
    """The tokens of one request that one step computes: positions `start .. start + len(token_ids) - 1`.

    A tuple, because a thousand of them are made in each step.
    """

    request_id: str
    token_ids: Sequence[int]  # at least one
    start: int  # = num_computed_tokens before the step
    block_ids: Sequence[int]  # the whole block table; covers start + len(token_ids) slots
    samples: bool  # draw the next token from the last position's logits
    output_position: int  # index of that drawn token among the request's outputs; counts on after preemption
    params: SamplingParams

    @classmethod
    def of_columns(cls, *columns: Iterable[Any]) -> list[PlannedRow]:
        """One row for each place in the columns, which are all fields in their order."""
        return list(map(tuple.__new__, repeat(cls), zip(*columns, strict=False)))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Cost: the runner reads every row once; `sum(len(row.token_ids))` is within the budget."""

    step_id: int
    rows: Sequence[PlannedRow]
    num_decode_rows: int = 0  # so many rows, the first ones, have a single token and sample

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """`token_ids[i]` is the token drawn for `rows[i]`, or None where the row does not sample."""

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
