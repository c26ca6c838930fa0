"""The contract between deciding and computing: `StepPlan`s go in, one `StepResult` for each comes out, in order.

    launch(plan 1)  launch(plan 2)  collect() -> result 1  launch(plan 3)  collect() -> result 2 ...

The scheduler fills a plan, a `Runner` computes it. A row is some consecutive tokens of one sequence (a choice of a
request): there are no prefill and decode rows, only more or fewer tokens. As there are many rows of a single token,
they come in columns. A plan may be launched before the result of the one before it is known; the token that such a row
starts from is then `UNKNOWN_TOKEN` in the plan, and the runner takes the one that it drew itself. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from common.generation import TokenLogprobs
from common.sampling_params import SamplingParams

UNKNOWN_TOKEN = -1  # the token that the step before drew for this sequence


class PlannedRow(NamedTuple):
    """The tokens of one sequence that one step computes: positions `start .. start + len(token_ids) - 1`."""

    request_id: str  # of the sequence: unique among the live ones
    token_ids: Sequence[int]  # at least one
    start: int  # = num_computed_tokens before the step
    block_ids: Sequence[int]  # the whole block table; covers start + len(token_ids) slots
    samples: bool  # draw the next token from the last position's logits
    output_position: int  # index of that drawn token among the sequence's outputs; counts on after preemption
    params: SamplingParams
    scores_prompt: bool = False  # result has the logprobs of token_ids[1:] and of the prompt token after the last


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one token that sample. Place i of every column is row i; see `PlannedRow` for their meaning."""

    request_ids: Sequence[str] = ()
    token_ids: Sequence[int] = ()  # may be `UNKNOWN_TOKEN`
    starts: Sequence[int] = ()
    block_ids: Sequence[Sequence[int]] = ()
    output_positions: Sequence[int] = ()
    params: Sequence[SamplingParams] = ()

    def __len__(self) -> int:
        return len(self.request_ids)


@dataclass(frozen=True, slots=True)
class Join:
    """A sequence that is new to the runner, or back after `Runner.forget`: all that draws may depend on."""

    request_id: str
    token_ids: Sequence[int]  # all known: prompt, then outputs; a copy
    num_prompt_tokens: int
    params: SamplingParams
    choice: int


class BlockCopy(NamedTuple):
    """The content of one block goes into another, before the step writes or reads any."""

    source: int
    target: int


class TokenMasks(Protocol):
    """Which tokens grammars allow in one step; being worked out while the step runs."""

    def wait(self) -> Mapping[int, NDArray[np.uint32]]:
        """Row of the plan -> [ceil(vocab_size / 32)] bits, bit i % 32 of word i // 32 set where token i is allowed.

        Blocks until they are there; rows that are absent are free. Called once, from the runner's thread.
        """


@dataclass(frozen=True)
class StepPlan:
    """One step's work, never changed once made; `num_tokens` is within the budget.

    Row i of the step is row i of `decode`, and after these come the `chunks`.
    """

    step_id: int
    chunks: Sequence[PlannedRow]
    decode: DecodeRows = field(default_factory=DecodeRows)
    joins: Sequence[Join] = ()  # sequences of this plan that sample in it or later
    copies: Sequence[BlockCopy] = ()
    masks: TokenMasks | None = None  # None: no row is constrained

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
            decode.output_positions, decode.params, repeat(False), strict=False)
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
    """`token_ids[i]` is the token drawn for row i of the plan, or None where the row does not sample.

    `logprobs`: of the drawn token, for the rows whose `params.logprobs` is not None. `prompt_logprobs`: for the rows
    with `scores_prompt`, one for each prompt token at positions `start + 1 .. start + len(token_ids)`, as far as the
    prompt goes (which tokens those are, `Join.token_ids` says).
    """

    step_id: int
    token_ids: Sequence[int | None]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, Sequence[TokenLogprobs]] = field(default_factory=dict)


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

    def launch(self, plan: StepPlan) -> None:
        """Begin a plan of at least one row. At most one other plan is launched and not collected."""

    def collect(self) -> StepResult:
        """The result of the oldest launched plan; waits for it."""

    def forget(self, request_id: str) -> None:
        """The sequence has ended or was preempted: drop its state, once every launched plan with it is collected."""
