"""The steps that are launched and not retired, and what has to stay until they are.

    planned ──launch──▶ in flight ──collect, take in──▶ retired

A sequence may end while a launched step still computes a row of it. It has had its last output then, but its blocks
stay with it (`leave`) until the last step that may touch them has retired; only then are they given back, and only
then does the runner forget it, even if a later one of the same id, which waits for that, has ended before. The same
holds for the blocks that a step copies from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.block_manager import BlockManager
from engine.decode_set import DecodePart
from engine.grammar.mask_job import MaskJob
from engine.request import Request, RequestStatus
from engine.step import PlannedRow, StepPlan


@dataclass(slots=True)
class ConstrainedRow:
    """A row whose draw a grammar limits, once the tokens before it are known."""

    row: int
    request: Request
    position: int  # of the drawn token among all tokens of the sequence


@dataclass(slots=True)
class PlannedStep:
    """A plan beside the sequences that its rows belong to."""

    plan: StepPlan
    decode: DecodePart
    chunks: Sequence[tuple[PlannedRow, Request]]
    job: MaskJob | None
    constrained: Sequence[ConstrainedRow]
    planned_at: float

    def provide_masks(self) -> None:
        """All tokens before the step's draws are known: fill the masks of those that still matter."""
        if self.job is None:
            return
        job, self.job = self.job, None
        job.provide({
            c.row: c.request.grammar for c in self.constrained
            if c.request.status is RequestStatus.RUNNING and c.request.num_tokens == c.position and c.request.grammar})


class InFlight:
    """At most two steps, in order."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._steps: deque[PlannedStep] = deque()
        self._leaving: dict[str, Request] = {}
        self._departed: list[str] = []
        self.newest_id = 0  # of the newest step that had rows
        self._retired_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, sequence_id: str) -> bool:
        """Whether an ended sequence of this id still has its blocks, and is known to the runner."""
        return sequence_id in self._leaving

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    def launch(self, step: PlannedStep) -> None:
        self._steps.append(step)
        self.newest_id = step.plan.step_id

    def provide_masks(self) -> None:
        """Of the step before which nothing is in flight any more. May be called again."""
        if len(self._steps) == 1:
            self._steps[0].provide_masks()

    def oldest(self) -> PlannedStep:
        return self._steps[0]

    def retire(self) -> None:
        """The oldest step has been taken in: give back what waited for it."""
        plan = self._steps.popleft().plan
        self._retired_id = plan.step_id
        self._blocks.release_sources(plan.copies)
        if self._leaving:
            for request in [r for r in self._leaving.values() if r.last_step_id <= self._retired_id]:
                del self._leaving[request.sequence_id]
                self._depart(request)

    def leave(self, request: Request) -> None:
        """The sequence has ended or lost its blocks: free these once no launched step touches them."""
        if request.last_step_id > self._retired_id:
            self._leaving[request.sequence_id] = request
        else:
            self._depart(request)

    def abandon(self) -> None:
        """No step will be collected any more."""
        while self._steps:
            step = self._steps[0]
            if step.job is not None:
                step.job.provide({})
                step.job = None
            self.retire()

    def take_departed(self) -> list[str]:
        """Sequences that are gone since the last call: whatever a runner keeps for them is stale."""
        departed, self._departed = self._departed, []
        return departed

    def owners(self) -> Iterator[Request]:
        return iter(self._leaving.values())

    def source_blocks(self) -> Iterator[int]:
        return (copy.source for step in self._steps for copy in step.plan.copies)

    def _depart(self, request: Request) -> None:
        self._blocks.free(request)
        if request.sequence_id not in self._leaving:
            self._departed.append(request.sequence_id)
