"""A runner without a model, for tests, simulation and forced outputs; used only behind a named flag.

Its KV cache is an array of token ids, one int32 per slot and -1 where none was written, written and read through the
block tables as a real cache is. Prompt tokens that came from a prefix hit or a transfer never pass through it,
so they are read back from the blocks: a block that was shared, evicted, re-granted or copied wrongly shows as a wrong
token or as an error.

- `echo`: output i of a request is its prompt token i, then end-of-sequence. Forces an exact text.
- `hash`: the next token is a pseudo-random function of all tokens before it and of the choice; never end-of-sequence,
  but where a grammar limits it.

A sequence: unknown ──join──▶ known ──forget──▶ unknown. Sampling parameters are ignored but for which logprobs are
asked for. The work is done in `collect`, so that what is done too early to blocks of a step in flight shows.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import deque
from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from common.generation import TokenLogprobs
from engine import block_memory
from engine.block_memory import Allocate
from engine.launch_check import LaunchCheck
from engine.step import UNKNOWN_TOKEN, Join, PlannedRow, StepPlan, StepResult

_UNWRITTEN = -1


class MockMode(StrEnum):
    ECHO = "echo"
    HASH = "hash"


class MockRunner:
    """Implements `engine.step.Runner`. `step_seconds` is slept in each step.

    `checks_launches`: also hold every plan against those in flight, at a cost that grows with the block tables.
    """

    def __init__(
        self, mode: MockMode, *, num_blocks: int, block_size: int, vocab_size: int,
        eos_token_ids: frozenset[int], step_seconds: float = 0.0,
        allocate: Allocate = block_memory.private, checks_launches: bool = False,
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
        self._joined: dict[str, Join] = {}
        self._drawn: dict[str, tuple[int, int]] = {}  # of each sequence: the newest draw, (position, token)
        self._check = LaunchCheck(block_size) if checks_launches else None

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def block_bytes(self) -> int:
        return self._block_size * 4

    def block_view(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self._num_blocks:
            raise IndexError(f"block {block_id} is outside the pool of {self._num_blocks}")
        return self._bytes[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def launch(self, plan: StepPlan) -> None:
        """Raises `RuntimeError` for a join of a known sequence, or a third plan in flight."""
        if len(self._launched) > 1:
            raise RuntimeError(f"step {plan.step_id} is launched while two others are in flight")
        if self._check is not None:
            self._check.launch(plan)
        for join in plan.joins:
            if join.request_id in self._joined:
                raise RuntimeError(f"request {join.request_id} joins in step {plan.step_id}, but is known")
            self._joined[join.request_id] = join
        self._launched.append(plan)

    def collect(self) -> StepResult:
        """Copy, write all rows, then draw.

        Raises `RuntimeError` on a slot that is written twice or read without being written, on an unknown token that
        was not drawn here, and on a draw for a sequence that has not joined.
        """
        plan = self._launched.popleft()
        if self._check is not None:
            self._check.collect()
        if self._step_seconds:
            time.sleep(self._step_seconds)
        for source, target in plan.copies:
            self.block_view(target)[:] = self.block_view(source)
        self._write(plan)
        masks = plan.masks.wait() if plan.masks is not None else {}
        token_ids = [
            self._draw(row, masks.get(index)) if row.samples else None for index, row in enumerate(plan.rows)]
        return self._result(plan, token_ids)

    def forget(self, request_id: str) -> None:
        """Raises `RuntimeError` while a launched plan has the sequence."""
        if self._check is not None and any(r.request_id == request_id for plan in self._launched for r in plan.rows):
            raise RuntimeError(f"request {request_id} is forgotten while it is in flight")
        self._joined.pop(request_id, None)
        self._drawn.pop(request_id, None)

    def _write(self, plan: StepPlan) -> None:
        written: set[int] = set()
        for row in plan.rows:
            for position, token_id in enumerate(row.token_ids, row.start):
                slot = self._slot(row, position)
                if slot in written:
                    raise RuntimeError(f"slot {slot} is written twice in step {plan.step_id}")
                written.add(slot)
                self._slots[slot] = self._resolved(row, position) if token_id == UNKNOWN_TOKEN else token_id

    def _resolved(self, row: PlannedRow, position: int) -> int:
        drawn = self._drawn.get(row.request_id)
        if drawn is None or drawn[0] != position:
            raise RuntimeError(f"request {row.request_id}: position {position} is unknown here too")
        return drawn[1]

    def _draw(self, row: PlannedRow, mask: NDArray[np.uint32] | None) -> int:
        join = self._joined.get(row.request_id)
        if join is None:
            raise RuntimeError(f"request {row.request_id} draws, but has not joined")
        num_tokens = row.start + len(row.token_ids)
        if self._mode is MockMode.HASH:
            known = self._read(row, num_tokens)
            token_id = hashed_token(
                known, self._vocab_size, self._eos_token_ids, join.choice, None if mask is None else allowed_ids(mask))
        elif row.output_position < join.num_prompt_tokens:
            token_id = self._read(row, num_tokens)[row.output_position]
        else:
            token_id = min(self._eos_token_ids)
        self._drawn[row.request_id] = (num_tokens, token_id)
        return token_id

    def _result(self, plan: StepPlan, token_ids: Sequence[int | None]) -> StepResult:
        logprobs, prompt_logprobs = {}, {}
        for index, (row, token_id) in enumerate(zip(plan.rows, token_ids, strict=True)):
            if token_id is not None and row.params.logprobs is not None:
                logprobs[index] = mock_logprobs(token_id)
            if row.scores_prompt:
                join = self._joined[row.request_id]
                end = min(row.start + len(row.token_ids) + 1, join.num_prompt_tokens)
                prompt_logprobs[index] = [mock_logprobs(t) for t in join.token_ids[row.start + 1 : end]]
        return StepResult(plan.step_id, token_ids, logprobs, prompt_logprobs)

    def _read(self, row: PlannedRow, num_tokens: int) -> list[int]:
        """The tokens whose KV the first slots of the row's table hold."""
        size, known = self._block_size, list[int]()
        for block_id in row.block_ids[: -(-num_tokens // size)]:
            known += self._slots[block_id * size : (block_id + 1) * size].tolist()
        del known[num_tokens:]
        if _UNWRITTEN in known or len(known) < num_tokens:
            position = known.index(_UNWRITTEN) if _UNWRITTEN in known else len(known)
            raise RuntimeError(f"request {row.request_id}: position {position} is read but was never written")
        return known

    def _slot(self, row: PlannedRow, position: int) -> int:
        index, offset = divmod(position, self._block_size)
        if index >= len(row.block_ids):
            raise RuntimeError(f"request {row.request_id}: no block for position {position}")
        return row.block_ids[index] * self._block_size + offset


def hashed_token(
    token_ids: Sequence[int], vocab_size: int, eos_token_ids: frozenset[int], choice: int = 0,
    allowed: Sequence[int] | None = None,
) -> int:
    """The token that mode `hash` draws after `token_ids`: the oracle of tests, which needs no cache.

    `allowed`: ascending ids, of which it is one; else it is any id but an end-of-sequence.
    """
    seed = array("I", token_ids).tobytes() + bytes([choice] if choice else [])
    number = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
    if allowed is not None:
        return allowed[number % len(allowed)]
    token_id = number % vocab_size
    while token_id in eos_token_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def allowed_ids(mask: NDArray[np.uint32]) -> list[int]:
    """The ids whose bit is set, ascending."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def mock_logprobs(token_id: int) -> TokenLogprobs:
    """What the mock says of a token, wherever it stands."""
    return TokenLogprobs(-0.5 - token_id % 7, (token_id,), (-0.5 - token_id % 7,))
