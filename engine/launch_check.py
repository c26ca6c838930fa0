"""Holds each plan against those in flight: whether it touches blocks that are still somebody else's. For the mock.

A block that a launched step reads or writes for one sequence must not be written for another one before that step has
retired: it was given back too early. The same holds for a block that a launched step copies from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.step import PlannedRow, StepPlan


class _Touched:
    """What one launched plan touches: for whom, and which blocks it only copies from."""

    def __init__(self, plan: StepPlan, block_size: int) -> None:
        self.users: dict[int, set[str]] = {}
        for row in plan.rows:
            for block_id in row.block_ids[: -(-(row.start + len(row.token_ids)) // block_size)]:
                self.users.setdefault(block_id, set()).add(row.request_id)
        self.sources = {copy.source for copy in plan.copies}


class LaunchCheck:
    """Raises `RuntimeError` on the first fault."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._launched: deque[_Touched] = deque()
        self._writer: dict[int, str] = {}  # of each block, the newest

    def launch(self, plan: StepPlan) -> None:
        for row in plan.rows:
            for block_id in self._written(row):
                self._check(plan.step_id, block_id, row.request_id)
        for copy in plan.copies:
            self._check(plan.step_id, copy.target, "a copy")
        for row in plan.rows:
            self._writer.update(dict.fromkeys(self._written(row), row.request_id))
        self._launched.append(_Touched(plan, self._block_size))

    def collect(self) -> None:
        self._launched.popleft()

    def _check(self, step_id: int, block_id: int, writer: str) -> None:
        for touched in self._launched:
            users = touched.users.get(block_id)
            if users is not None and writer not in users:
                raise RuntimeError(
                    f"step {step_id} writes block {block_id} for {writer} while it is in flight for {sorted(users)}")
            if block_id in touched.sources and users is None and self._writer.get(block_id) != writer:
                raise RuntimeError(f"step {step_id} writes block {block_id} for {writer} while it is copied from")

    def _written(self, row: PlannedRow) -> Iterator[int]:
        first, end = row.start // self._block_size, (row.start + len(row.token_ids) - 1) // self._block_size + 1
        return iter(row.block_ids[first:end])
