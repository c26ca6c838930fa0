"""The fields that say how tokens are drawn and where the output ends: the same in chat and completions.

Bounds are those of `common.sampling_params`, said here too so that the API's document has them.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from common.errors import InvalidRequest
from common.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
)
from common.sampling_params import (
    MAX_BAD_WORDS as MAX_BAD_WORD_SEQUENCES,
)
from gateway.field_types import (
    INT32_MAX,
    MAX_STOP_CHARS,
    MAX_STOPS,
    WHOLE,
    Finite,
    NumLogprobs,
    Texts,
    TokenIds,
    text_bounds,
)

MAX_BAD_WORDS = MAX_BAD_WORD_SEQUENCES // 2  # at the start of a text and after a space, a word has other tokens
MAX_BAD_WORD_CHARS = 256
# Named in an `Order` as here; absent fields keep the order's defaults.
_SAME_IN_ORDER = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "n", "min_tokens",
    "ignore_eos", "skip_special_tokens")
_BIAS_BOUNDS: JsonDict = {
    "maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}


class SamplingFields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="most tokens of output of each choice; a prompt and they have to fit the context")
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(
        None, description="no end of sequence and no stop token before so many tokens of output; at most max_tokens")
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = Field(
        None, description="choices of each prompt; default 1")
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = Field(
        None, description="at least n, and of no effect: n choices are drawn and all are answered")
    temperature: Finite | None = Field(None, ge=0, le=2, description="0: greedy; default 1")
    top_p: Finite | None = Field(
        None, gt=0, le=1, description="draw from the likeliest that together have this probability; default 1")
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="draw from so many of the likeliest; 0 or -1: off (default)")
    min_p: Finite | None = Field(
        None, ge=0, le=1, description="leave out tokens less likely than this part of the likeliest; default 0")
    presence_penalty: Finite | None = Field(None, ge=-2, le=2, description="of tokens in the output; default 0")
    frequency_penalty: Finite | None = Field(
        None, ge=-2, le=2, description="for each time that a token is in the output; default 0")
    repetition_penalty: Finite | None = Field(
        None, gt=0, le=2, description="of tokens in prompt and output; default 1")
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE] | None = Field(
        None, description="the same seed draws the same tokens; drawn when absent")
    stop: str | Annotated[Texts, Field(max_length=MAX_STOPS)] | None = Field(
        None, description="texts that end the output", json_schema_extra=text_bounds(MAX_STOPS, MAX_STOP_CHARS))
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description="token ids that end the output")
    include_stop_str_in_output: bool | None = Field(None, description="keep what ended the output; default false")
    ignore_eos: bool | None = Field(None, description="go on at an end of sequence; default false")
    skip_special_tokens: bool | None = Field(None, description="leave special tokens out of the text; default true")
    logit_bias: dict[str, Any] | None = Field(
        None, description="token id → what is added to its logit", json_schema_extra=_BIAS_BOUNDS)
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = Field(
        None, description="nothing else is drawn; absent or empty: all")
    bad_words: Annotated[Texts, Field(max_length=MAX_BAD_WORDS)] | None = Field(
        None, description="texts that never appear", json_schema_extra=text_bounds(MAX_BAD_WORDS, MAX_BAD_WORD_CHARS))
    prompt_logprobs: NumLogprobs | None = Field(
        None, description="of each prompt token, with so many alternatives; not with stream: true")

    def sampling(self) -> dict[str, Any]:
        """The fields of an `Order` that were sent. Raises `InvalidRequest` with `param`."""
        sent = {name: getattr(self, name) for name in _SAME_IN_ORDER}
        sent["include_stop"] = self.include_stop_str_in_output
        sent["top_k"] = 0 if self.top_k == -1 else self.top_k
        sent["seed"] = None if self.seed is None else self.seed & (2**64 - 1)
        sent["prompt_logprobs"] = None if self.prompt_logprobs is False else self.prompt_logprobs
        sent["allowed_token_ids"] = tuple(self.allowed_token_ids or ()) or None
        self._check_best_of()
        return {
            "stop": _texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop, MAX_STOP_CHARS),
            "bad_words": _texts("bad_words", self.bad_words, MAX_BAD_WORD_CHARS),
            "stop_token_ids": tuple(self.stop_token_ids or ()), "logit_bias": _logit_bias(self.logit_bias),
            **{name: value for name, value in sent.items() if value is not None}}

    def _check_best_of(self) -> None:
        num_choices = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of < num_choices:
            raise InvalidRequest(
                f"best_of: must be at least n, which is {num_choices}, got {self.best_of}", param="best_of")


def _texts(name: str, texts: list[str] | None, most_chars: int) -> tuple[str, ...]:
    texts = texts or []
    for text in texts:
        if not 1 <= len(text) <= most_chars:
            raise InvalidRequest(
                f"{name}: each string must have 1 to {most_chars} characters, got one of {len(text)}", param=name)
    return tuple(texts)


def _logit_bias(bias: dict[str, Any] | None) -> dict[int, float]:
    out: dict[int, float] = {}
    if bias and len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias: at most {MAX_LOGIT_BIAS} entries, got {len(bias)}", param="logit_bias")
    for key, value in (bias or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise InvalidRequest("logit_bias: each value must be a number from -100 to 100", param="logit_bias")
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidRequest("logit_bias: each key must be a token id", param="logit_bias")
        out[int(key)] = float(value)
    return out
