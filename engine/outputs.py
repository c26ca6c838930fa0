"""What the engine tells its callers: per request what a step brought, and counters of the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import ShoalError
from common.generation import FinishReason

__all__ = ["EngineStats", "FinishReason", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one request. Exactly one output of a request, its last, has a `finish_reason`."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()  # includes the end-of-sequence or stop token, if one was drawn
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the drawn token that ended it with `stop`
    num_prompt_tokens: int = 0  # of the original prompt; preemption never changes it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at the first admission
    num_output_tokens: int = 0  # all output tokens so far
    error: ShoalError | None = None
    queue_s: float = 0.0  # submitted → first admitted


@dataclass(slots=True)
class EngineStats:
    """Gauges (`num_running` to `num_leaked_blocks`) and, below them, counters since the start.

    The scheduler keeps one for its counters; readers get copies with the gauges filled in.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # grantable now: free or only cached
    num_blocks: int = 0
    num_leaked_blocks: int = 0  # as of the last integrity check; must be 0
    num_preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up, counted at a request's first admission
    prefix_hits: int = 0  # those of them that were found
    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests, cached ones included
    num_generated_tokens: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
