"""What the engine tells its callers: per request what a step brought, and counters of the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

from common.errors import ShoalError
from common.generation import FinishReason, RequestTiming, TokenLogprobs

__all__ = ["EngineStats", "FinishReason", "RequestOutput"]


class RequestOutput(NamedTuple):
    """What one step brought for one choice of a request. A tuple, because a thousand are made in each step.

    The last output of a choice has a `finish_reason`; all others have none. A request is gone when all its choices
    have ended, or when an output of it has an error. One that is released has no last output. One that is
    `prefill_only` has an output without tokens after each step that computed some of its KV.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()  # includes the end-of-sequence or stop token, if one was drawn
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the drawn token that ended it with `stop`
    num_prompt_tokens: int = 0  # of the original prompt; preemption never changes it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache at the first admission
    num_output_tokens: int = 0  # all output tokens so far
    error: ShoalError | None = None
    queue_s: float = 0.0  # submitted → first admitted
    num_computed_tokens: int = 0  # tokens of prompt and output whose KV is in the request's blocks
    choice: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of new_token_ids, where asked for
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # with the first token, where asked for
    timing: RequestTiming | None = None  # with the first token of a choice and with its last output

    @classmethod
    def of_columns(cls, *columns: Iterable[Any]) -> list[RequestOutput]:
        """One output for each place in the columns, which are all fields in their order."""
        return list(map(tuple.__new__, repeat(cls), zip(*columns, strict=False)))


@dataclass(slots=True)
class EngineStats:
    """Gauges (`num_running` to `prefill_tokens_per_s`) and, below them, counters since the start.

    The scheduler keeps one for its counters; readers get copies with the gauges filled in.
    """

    num_running: int = 0
    num_waiting: int = 0  # without blocks, or with blocks and no place to run
    num_awaiting: int = 0  # requests whose KV comes from elsewhere
    num_awaiting_blocks: int = 0  # in their block tables; each counted once
    num_held: int = 0  # requests that are prefilled and keep their blocks until released
    num_pinned_blocks: int = 0
    num_waiting_tokens: int = 0  # to be computed before each waiting or running request can draw its next token
    num_free_blocks: int = 0  # grantable now: free or only cached
    num_blocks: int = 0
    num_leaked_blocks: int = 0  # as of the last integrity check; must be 0
    step_s: float = 0.0  # of a step with work, smoothed; 0 = unknown
    prefill_tokens_per_s: float = 0.0  # over steps that computed a fair number of prompt tokens, smoothed; 0 = unknown
    num_preemptions: int = 0
    num_swapped_out_blocks: int = 0  # of preempted sequences, that a lower tier kept
    num_swapped_in_blocks: int = 0  # of them, that came back
    num_recomputed_tokens: int = 0  # computed a second time after a preemption
    num_wasted_rows: int = 0  # computed for sequences that had ended meanwhile
    prefix_queries: int = 0  # prompt tokens looked up, counted at a request's first admission
    prefix_hits: int = 0  # those of them that were found
    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted requests, cached ones included
    num_generated_tokens: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
