"""When a sequence has its last token."""

from __future__ import annotations

from dataclasses import dataclass

from engine.outputs import FinishReason
from engine.request import Request


@dataclass(frozen=True, slots=True)
class FinishRule:
    """`max_total_tokens`: of prompt and output of any request. Grammars end by themselves; see `Intake`."""

    eos_token_ids: frozenset[int]
    max_total_tokens: int

    def last_length(self, request: Request) -> int:
        """The number of known tokens at which the sequence ends, if no token stops it before."""
        return min(request.num_prompt_tokens + request.params.max_tokens, self.max_total_tokens)

    def reason(self, request: Request, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id`, its newest token; None if it goes on. A stop wins over the length."""
        params = request.params
        is_stop = (token_id in self.eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
        if is_stop and request.num_output_tokens > params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if request.num_tokens >= self.last_length(request) else None
