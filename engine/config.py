"""What one engine may use. Torch-free; limits are checked where the value enters."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. `num_blocks` blocks of `block_size` token slots are the whole KV cache."""

    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int = 8192  # tokens of prompt + output of one request
    max_num_seqs: int = 64  # running requests
    max_num_batched_tokens: int = 512  # the token budget of one step
    max_num_waiting: int = 256  # queued requests beyond the running ones; one more is refused
    enable_prefix_caching: bool = True
    max_awaiting_fraction: float = 0.4  # of the blocks, that may await KV from elsewhere; one load alone may take more
    enable_overlap: bool = True  # plan and launch a step while the one before runs; never changes a token
    headroom_fraction: float = 0.01  # of the blocks, that no admission takes while anything runs: running answers grow
    min_prefill_fraction: float = 0.1  # of the token budget, kept for prompts: fewer run where they would take more

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
                     "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}", param=name)
        if not 0.0 < self.max_awaiting_fraction <= 1.0:
            raise ConfigError(
                f"max_awaiting_fraction must be above 0 and at most 1, got {self.max_awaiting_fraction}",
                param="max_awaiting_fraction")
        for name in ("headroom_fraction", "min_prefill_fraction"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"{name} must be at least 0 and below 1, got {getattr(self, name)}", param=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running requests could not all decode in one step",
                param="max_num_batched_tokens")

    @property
    def max_running(self) -> int:
        """Sequences that run at once."""
        return max(1, min(self.max_num_seqs, int(self.max_num_batched_tokens * (1.0 - self.min_prefill_fraction))))
