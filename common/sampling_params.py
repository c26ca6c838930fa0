"""How one request wants its tokens drawn. Wire-free and torch-free: gateway, clients and engine share it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.errors import InvalidRequest

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated at construction; a bad value raises `InvalidRequest` naming the field and the limit.

    `seed` is always set: the gateway draws one when the client sends none, so that a retry repeats it.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    seed: int = 0  # 0 .. 2**64 - 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit, -100 .. 100

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("seed", self.seed, 0, 2**64 - 1)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0 and at most 1, got 0", param="top_p")
        _within("stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS, what="number of ids")
        _within("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS, what="number of entries")
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for an id outside `0 .. vocab_size - 1`."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}", param=name)


def _within(name: str, value: float, low: float, high: float, what: str = "") -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name}: {what + ' ' if what else ''}must be {low} to {high}, got {value}", param=name)
