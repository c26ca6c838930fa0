"""The contract between deciding and computing: one `StepPlan` goes in, one `StepResult` comes out.

The scheduler fills a plan, a `Runner` executes it. A row is some consecutive tokens of one request; there
are no prefill and decode rows, only more or fewer tokens. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """The tokens of one request that one step computes: positions `start .. start + len(token_ids) - 1`."""

    request_id: str
    token_ids: Sequence[int]  # at least one
    start: int  # = num_computed_tokens before the step
    block_ids: Sequence[int]  # the whole block table; covers start + len(token_ids) slots
    samples: bool  # draw the next token from the last position's logits
    output_position: int  # index of that drawn token among the request's outputs; counts on after preemption
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Cost: the runner reads every row once; `sum(len(row.token_ids))` is within the budget."""

    step_id: int
    rows: Sequence[PlannedRow]

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

    def execute(self, plan: StepPlan) -> StepResult: ...

    def forget(self, request_id: str) -> None:
        """The request has ended or was preempted: drop any state kept for it."""
