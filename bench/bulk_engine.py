"""An engine with blocks of the real model's size and no model, so that only moving them takes time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from common.block_hash import HashScheme
from common.kv_event import KvEvent
from common.service_record import Fingerprint
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.engine_port import EngineFacts, Fetch
from engine.outputs import RequestOutput
from engine.step import StepPlan, StepResult

BLOCK_SIZE: Final = 16
# The shape of SmolLM2-135M, so a block has 737,280 bytes.
FINGERPRINT: Final = Fingerprint("bench", "", "float32", BLOCK_SIZE, num_layers=30, num_kv_heads=3, head_dim=64)
BLOCK_BYTES: Final = 30 * 2 * 3 * BLOCK_SIZE * 64 * 4
_VOCAB_SIZE: Final = 1 << 16


class BulkRunner:
    """Implements `engine.step.Runner`: computes nothing, and always draws token 1. All its memory is touched."""

    vocab_size = _VOCAB_SIZE
    eos_token_ids = frozenset({0})
    block_bytes = BLOCK_BYTES

    def __init__(self, num_blocks: int, seed: int | None) -> None:
        """Random bytes from `seed`; None: zeros."""
        size = num_blocks * BLOCK_BYTES
        made = np.random.default_rng(seed).bytes(size) if seed is not None else bytes(size)
        self._bytes = memoryview(bytearray(made))
        self._launched: deque[StepPlan] = deque()

    def block_view(self, block_id: int) -> memoryview:
        return self._bytes[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES]

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        return StepResult(plan.step_id, [1 if row.samples else None for row in plan.rows])

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""


class BulkEngine:
    """One engine and its listener; `outputs` is told what the engine puts out."""

    def __init__(self, num_blocks: int, *, seed: int | None, caches: bool) -> None:
        config = EngineConfig(
            block_size=BLOCK_SIZE, num_blocks=num_blocks, enable_prefix_caching=caches, max_awaiting_fraction=1.0)
        scheme = HashScheme(b"bench".ljust(32), FINGERPRINT.model, "", FINGERPRINT.dtype, BLOCK_SIZE)
        self.engine = AsyncEngine(
            EngineCore(config, BulkRunner(num_blocks, seed), scheme), self, EngineFacts(FINGERPRINT, {}, BLOCK_BYTES))

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """A receiver has none; a sender replaces this."""

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        """Nobody listens."""

    def on_fetches(self, fetches: Sequence[Fetch]) -> None:
        """Nothing is preempted."""

    def on_failed(self, why: str) -> None:
        raise RuntimeError(why)


def prompt(num_blocks: int) -> tuple[int, ...]:
    """Token ids whose KV, that of all but the last, fills `num_blocks` blocks."""
    return tuple(2 + i % (_VOCAB_SIZE - 2) for i in range(num_blocks * BLOCK_SIZE + 1))
