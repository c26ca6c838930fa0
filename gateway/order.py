"""What one client asked for, validated and free of HTTP: the pipeline's input and its output."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from common.errors import InvalidRequest
from common.generation import FinishReason, ModelFacts
from common.sampling_params import SamplingParams
from common.tokenized import ChatPrompt


@dataclass(frozen=True, slots=True)
class Order:
    """One choice of one prompt. `request_id` is ours, unique and ordered by time; never the client's."""

    request_id: str
    model: ModelFacts
    prompt: ChatPrompt | str | tuple[int, ...]
    max_tokens: int | None  # None: what the context leaves, capped by configuration
    max_tokens_param: str = "max_tokens"  # the field it was sent in, named in errors
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = field(default_factory=lambda: secrets.randbits(64))  # drawn here, so that a retry repeats it
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)
    cache_salt: str = ""
    return_token_ids: bool = False

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """Raises `InvalidRequest` naming the field as the client sent it."""
        try:
            return SamplingParams(
                max_tokens=max_tokens, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
                seed=self.seed, ignore_eos=self.ignore_eos, stop_token_ids=self.stop_token_ids,
                logit_bias=self.logit_bias)
        except InvalidRequest as error:
            if error.param != "max_tokens" or self.max_tokens_param == "max_tokens":
                raise
            message = error.message.replace("max_tokens", self.max_tokens_param, 1)
            raise InvalidRequest(message, param=self.max_tokens_param) from None


def new_request_id() -> str:
    """32 hex digits: 48 bits of milliseconds, then 80 random bits (the layout of UUID 7 without its version bits)."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `num_output_tokens` counts up to the token that completed a stop."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New text. The first may be empty: it says that the worker has begun."""

    text: str
    usage: Usage
    token_ids: tuple[int, ...] = ()  # since the last piece; all pieces together: as many as the usage counts
    prompt_token_ids: tuple[int, ...] = ()  # in the first piece only
    fingerprint: str = ""  # of the weights and the KV layout that serve this request


@dataclass(frozen=True, slots=True)
class Ending:
    """The one last event of a generation that ended well."""

    finish_reason: FinishReason  # STOP or LENGTH
    stop_reason: str | int | None  # the stop string, or the stop token id the client gave
    usage: Usage
    fingerprint: str = ""
