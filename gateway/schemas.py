"""Bodies of the API as pydantic models (strict JSON types, null = absent), and what each means as an `Order`.

Unknown fields are ignored and counted; known fields that are not offered are in `unsupported.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest, UnsupportedValue
from common.generation import ModelFacts
from common.sampling_params import MAX_LOGIT_BIAS
from common.tokenized import ChatPrompt
from gateway import unsupported
from gateway.messages import Message, Tool, chat_prompt
from gateway.order import Order, new_request_id

MAX_MESSAGES = 8192
MAX_STOPS = 16
MAX_STOP_CHARS = 256
COMPLETION_MAX_TOKENS = 16
_INT32_MAX = 2**31 - 1

Finite = Annotated[float, Field(allow_inf_nan=False)]
# Lists fail at their first bad item: a body of a million of them must not cost a million error objects.
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=_INT32_MAX)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
Tools = Annotated[list[Tool], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and completions have in common."""

    model_config = ConfigDict(strict=True, extra="allow")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = Field(None, max_length=512, description="a name from /v1/models; null: the only one there is")
    max_tokens: int | None = Field(None, description="at least 1")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="only with stream: true")
    temperature: Finite | None = Field(None, description="0 (greedy) to 2; default 1")
    top_p: Finite | None = Field(None, description="more than 0, at most 1; default 1")
    top_k: int | None = Field(None, description="0 or -1: off (default)")
    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="drawn when absent")
    stop: str | Texts | None = Field(None, description=f"≤ {MAX_STOPS} strings of 1..{MAX_STOP_CHARS} characters")
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Any] | None = Field(None, description="token id → -100..100")
    skip_special_tokens: bool | None = Field(None, description="default true")
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = Field(None, description="also answer with token ids, as vLLM does")
    cache_salt: str | None = Field(None, max_length=512, description="prefix hits only among requests of one salt")

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_on_every_chunk(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """Raise `InvalidRequest` or `UnsupportedValue` for what no model could serve."""
        unsupported.check(self.model_extra or {}, self.neutral)
        if self.stream_options is not None and not self.streams:
            raise InvalidRequest("stream_options: allowed only with stream: true", param="stream_options")

    def _order(self, model: ModelFacts, prompt: ChatPrompt | str | tuple[int, ...], **own: Any) -> Order:
        given = {"temperature": self.temperature, "top_p": self.top_p, "ignore_eos": self.ignore_eos,
                 "include_stop": self.include_stop_str_in_output, "skip_special_tokens": self.skip_special_tokens,
                 "cache_salt": self.cache_salt, "return_token_ids": self.return_token_ids, **own}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.seed is not None:
            given["seed"] = self.seed & (2**64 - 1)
        return Order(
            request_id=new_request_id(), model=model, prompt=prompt, stop=_stops(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()), logit_bias=_logit_bias(self.logit_bias),
            **{"max_tokens": None, **{name: value for name, value in given.items() if value is not None}})


class ChatRequest(GenerationRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = unsupported.NEUTRAL_IN_CHAT

    messages: Messages
    max_completion_tokens: int | None = Field(None, description="wins over max_tokens")
    tools: Tools | None = Field(None, description="shown to the model by its template")
    tool_choice: str | dict[str, Any] | None = Field(None, description="none or auto")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = Field(None, description="refused: templates come only from the model")
    chat_template_kwargs: dict[str, Any] | None = None

    def order(self, model: ModelFacts) -> Order:
        self.check()
        _check_tool_choice(self.tool_choice, bool(self.tools))
        prompt = chat_prompt(
            self.messages, [] if self.tool_choice == "none" else self.tools or [], self.chat_template,
            self.chat_template_kwargs or {}, self.add_generation_prompt, self.continue_final_message)
        if self.max_completion_tokens is None:
            return self._order(model, prompt, max_tokens=self.max_tokens)
        return self._order(
            model, prompt, max_tokens=self.max_completion_tokens, max_tokens_param="max_completion_tokens")


class CompletionRequest(GenerationRequest):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = unsupported.NEUTRAL_IN_COMPLETIONS

    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="one text, or one list of token ids; not empty")
    add_special_tokens: bool | None = Field(None, description="default true")

    def order(self, model: ModelFacts) -> Order:
        self.check()
        max_tokens = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self._order(
            model, _one_prompt(self.prompt), max_tokens=max_tokens, add_special_tokens=self.add_special_tokens)


class TokenizeRequest(BaseModel):
    """A text (`prompt`) or a conversation (`messages`)."""

    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = Field(None, description="default true; for a text only")
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    def source(self) -> ChatPrompt | str:
        """What to tokenize. Raises `InvalidRequest` unless exactly one of the two was sent."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
        if self.prompt is not None:
            return self.prompt
        return chat_prompt(
            self.messages or [], self.tools or [], self.chat_template, self.chat_template_kwargs or {},
            self.add_generation_prompt, self.continue_final_message)


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, max_length=512)
    tokens: TokenIds


def _one_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> str | tuple[int, ...]:
    """The single prompt of a request. Several, or one without any content, are refused."""
    if isinstance(prompt, str):
        prompts: list[str | tuple[int, ...]] = [prompt]
    elif all(isinstance(item, int) for item in prompt):
        prompts = [tuple(item for item in prompt if isinstance(item, int))]
    else:
        prompts = [item if isinstance(item, str) else tuple(item) for item in prompt if not isinstance(item, int)]
    if len(prompts) > 1:
        raise UnsupportedValue(f"prompt: one prompt a request is offered, got {len(prompts)}", param="prompt")
    if not prompts[0]:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    return prompts[0]


def _stops(stop: str | Texts | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop: each string must have 1 to {MAX_STOP_CHARS} characters, got one of {len(text)}", param="stop")
    return tuple(stops)


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


def _check_tool_choice(choice: str | dict[str, Any] | None, has_tools: bool) -> None:
    if choice in (None, "none", "auto"):
        return
    if not has_tools:
        raise InvalidRequest("tool_choice: asks for a tool, but tools is absent or empty", param="tool_choice")
    if choice == "required" or isinstance(choice, dict):
        raise UnsupportedValue("tool_choice: this server offers only 'none' or 'auto'", param="tool_choice")
    raise InvalidRequest("tool_choice: must be 'none', 'auto', 'required' or a named function", param="tool_choice")
