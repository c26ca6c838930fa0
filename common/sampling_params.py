"""How one request wants its tokens drawn. Wire-free and torch-free: gateway, clients and engine share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import InvalidRequest
from common.grammar import Grammar

MAX_N = 64
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated at construction; a bad value raises `InvalidRequest` naming the field and the limit.

    `seed` is always set: the gateway draws one when the client sends none, so that a retry repeats it. Penalties are
    as in the OpenAI API (presence and frequency: of output tokens) and in CTRL (repetition: of prompt and output;
    Keskar et al. 2019).
    """

    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    seed: int = 0  # 0 .. 2**64 - 1
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit, -100 .. 100
    n: int = 1  # parallel choices of one prompt
    min_p: float = 0.0  # tokens less likely than min_p * the likeliest are left out; 0 = off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1 = off
    min_tokens: int = 0  # no end-of-sequence and no stop token before so many outputs
    logprobs: int | None = None  # of each drawn token, and so many alternatives; None = off
    prompt_logprobs: int | None = None  # the same of each prompt token but the first
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is drawn; None = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that never appear in the output
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("n", self.n, 1, MAX_N)
        _within("temperature", self.temperature, 0.0, 2.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be greater than 0 and at most 1, got 0", param="top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        _whole("seed", self.seed, 0, 2**64 - 1)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 2.0)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest(
                "repetition_penalty must be greater than 0 and at most 2, got 0", param="repetition_penalty")
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        _within("stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS, what="number of ids")
        _within("logit_bias", len(self.logit_bias), 0, MAX_LOGIT_BIAS, what="number of entries")
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _within("allowed_token_ids", len(self.allowed_token_ids), 1, MAX_ALLOWED_TOKEN_IDS, what="number of ids")
        _within("bad_words", len(self.bad_words), 0, MAX_BAD_WORDS, what="number of sequences")
        for word in self.bad_words:
            _within("bad_words", len(word), 1, MAX_BAD_WORD_TOKENS, what="tokens of a sequence")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it by more than the model's logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` for an id that is not a whole number `0 .. vocab_size - 1`."""
        named: tuple[tuple[str, Iterable[int]], ...] = (
            ("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", (token_id for word in self.bad_words for token_id in word)))
        for name, ids in named:
            for token_id in ids:
                if isinstance(token_id, bool) or not (isinstance(token_id, int) and 0 <= token_id < vocab_size):
                    raise InvalidRequest(
                        f"{name}: token id {token_id} is outside the vocabulary 0..{vocab_size - 1}", param=name)


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int):
        raise InvalidRequest(f"{name}: must be a whole number, got {value!r}", param=name)
    _within(name, value, low, high)


def _within(name: str, value: float, low: float, high: float, what: str = "") -> None:
    """Neither a NaN nor an infinity lies between two finite numbers. A boolean is no number here."""
    if isinstance(value, bool) or not (isinstance(value, int | float) and low <= value <= high):
        raise InvalidRequest(f"{name}: {what + ' ' if what else ''}must be {low} to {high}, got {value}", param=name)
