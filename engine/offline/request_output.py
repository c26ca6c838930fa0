"""What a Python user gets back, with vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass

from common.generation import RequestTiming, TokenLogprobs
from common.text.model_tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token at one position. `rank` is 1 for the likeliest; None beyond those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `token_ids` has the token that ended it, `text` does not."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class RequestOutput:
    """`metrics` is of the first choice. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTiming | None
    num_cached_tokens: int


def described(token_id: int, entry: TokenLogprobs, tokenizer: ModelTokenizer) -> dict[int, Logprob]:
    """Token id → logprob: the likeliest, and the token itself."""
    found = {
        top: Logprob(logprob, rank, tokenizer.decode([top], skip_special_tokens=False))
        for rank, (top, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), 1)}
    if token_id not in found:
        found[token_id] = Logprob(entry.logprob, None, tokenizer.decode([token_id], skip_special_tokens=False))
    return found
