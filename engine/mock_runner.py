"""A runner without a model, for tests, simulation and forced outputs; used only behind a named flag.

Its KV cache is an array of token ids, one int32 per slot and -1 where none was written, written and read through the
block tables as a real cache is. Prompt tokens that came from a prefix hit or a transfer never pass through `execute`,
so they are read back from the blocks: a block that was shared, evicted, re-granted or copied wrongly shows as a wrong
token or as an error.

- `echo`: output i of a request is its prompt token i, then end-of-sequence. Forces an exact text.
- `hash`: the next token is a pseudo-random function of all tokens before it, never end-of-sequence.

Sampling parameters are ignored.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from engine import block_memory
from engine.block_memory import Allocate
from engine.step import PlannedRow, StepPlan, StepResult

_UNWRITTEN = -1


class MockMode(StrEnum):
    ECHO = "echo"
    HASH = "hash"


class MockRunner:
    """Implements `engine.step.Runner`. `step_seconds` is slept in each step."""

    def __init__(
        self, mode: MockMode, *, num_blocks: int, block_size: int, vocab_size: int,
        eos_token_ids: frozenset[int], step_seconds: float = 0.0,
        allocate: Allocate = block_memory.private,
    ) -> None:
        if not eos_token_ids or len(eos_token_ids) >= vocab_size or not eos_token_ids <= set(range(vocab_size)):
            raise ValueError(f"eos_token_ids must be 1 to {vocab_size - 1} ids within 0..{vocab_size - 1}")
        self._mode = mode
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._bytes = allocate(num_blocks * block_size * 4)
        self._slots = self._bytes.cast("i")
        self._slots[:] = array("i", [_UNWRITTEN]) * (num_blocks * block_size)
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._step_seconds = step_seconds
        self._launched: deque[StepPlan] = deque()

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def block_bytes(self) -> int:
        return self._block_size * self._slots.itemsize

    def block_view(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self._num_blocks}")
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def launch(self, plan: StepPlan) -> None:
        """The work is done in `collect`: there is no other processor to give it to."""
        self._launched.append(plan)

    def collect(self) -> StepResult:
        return self._execute(self._launched.popleft())

    def _execute(self, plan: StepPlan) -> StepResult:
        """Write all rows, then draw. Raises `RuntimeError` on a slot written twice in one step or never written."""
        if self._step_seconds:
            time.sleep(self._step_seconds)
        written: set[int] = set()
        for row in plan.rows:
            for position, token_id in enumerate(row.token_ids, row.start):
                slot = self._slot(row, position)
                if slot in written:
                    raise RuntimeError(f"slot {slot} is written twice in step {plan.step_id}")
                written.add(slot)
                self._slots[slot] = token_id
        return StepResult(plan.step_id, [self._draw(row) if row.samples else None for row in plan.rows])

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def _draw(self, row: PlannedRow) -> int:
        num_tokens = row.start + len(row.token_ids)
        if self._mode is MockMode.HASH:
            return hashed_token([self._read(row, p) for p in range(num_tokens)], self._vocab_size, self._eos_token_ids)
        num_prompt_tokens = num_tokens - row.output_position
        if row.output_position < num_prompt_tokens:
            return self._read(row, row.output_position)
        return min(self._eos_token_ids)

    def _read(self, row: PlannedRow, position: int) -> int:
        token_id = self._slots[self._slot(row, position)]
        if token_id == _UNWRITTEN:
            raise RuntimeError(f"request {row.request_id}: position {position} is read but was never written")
        return token_id

    def _slot(self, row: PlannedRow, position: int) -> int:
        index, offset = divmod(position, self._block_size)
        if index >= len(row.block_ids):
            raise RuntimeError(f"request {row.request_id}: no block for position {position}")
        return row.block_ids[index] * self._block_size + offset


def hashed_token(token_ids: Sequence[int], vocab_size: int, eos_token_ids: frozenset[int]) -> int:
    """The token that mode `hash` draws after `token_ids`: the oracle of tests, which needs no cache."""
    digest = hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=8).digest()
    token_id = int.from_bytes(digest, "little") % vocab_size
    while token_id in eos_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id
