"""Engines as the measurements need them: the real model's, and one whose model costs nothing."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from common.block_hash import HashScheme
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.runner_loading import load_runner
from engine.step import StepPlan, StepResult

BLOCK_SIZE = 16


class IdleRunner:
    """Implements `engine.step.Runner`: draws token 1 everywhere. `used_slots` of `held_slots` hold a token."""

    vocab_size = 1 << 17
    eos_token_ids = frozenset({0})
    block_bytes = 1

    def __init__(self, block_size: int = BLOCK_SIZE, *, counts_slots: bool = False) -> None:
        self._block_size, self._counts_slots = block_size, counts_slots
        self._launched: deque[StepPlan] = deque()
        self.used_slots = self.held_slots = 0

    def block_view(self, block_id: int) -> memoryview:
        raise IndexError(f"block {block_id}: there are no bytes here")

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        if self._counts_slots:
            self._count(plan)
        return StepResult(plan.step_id, [1] * len(plan.decode) + [1 if row.samples else None for row in plan.chunks])

    def forget(self, request_id: str) -> None:
        """Nothing is kept per request."""

    def _count(self, plan: StepPlan) -> None:
        for row in plan.rows:
            self.used_slots += row.start + len(row.token_ids)
            self.held_slots += len(row.block_ids) * self._block_size


def model_core(
    model_path: Path, *, num_threads: int, num_blocks: int = 2048, max_num_seqs: int = 64, caches: bool = False,
) -> EngineCore:
    """The real model in this process, with no RPC around it."""
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
                          max_num_batched_tokens=512, enable_prefix_caching=caches)
    return EngineCore(config, load_runner(model_path, config, num_threads=num_threads),
                      scheme(BLOCK_SIZE, model_path.name))


def idle_core(runner: IdleRunner, config: EngineConfig) -> EngineCore:
    return EngineCore(config, runner, scheme(config.block_size, "idle"))


def scheme(block_size: int, model: str) -> HashScheme:
    return HashScheme(b"bench".ljust(32), model, "", "float32", block_size)


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Ids of common tokens; prompts of two seeds differ in their first block."""
    return [1000 + (seed * 7919 + i * 31) % 20_000 for i in range(num_tokens)]
