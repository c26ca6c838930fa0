"""The body of `/v1/completions`: one order for each prompt."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, cast

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from common.errors import InvalidRequest
from common.generation import ModelFacts
from gateway import unsupported
from gateway.field_types import INT32_MAX, WHOLE, NumLogprobs, Texts, TokenIds
from gateway.generation_request import GenerationRequest
from gateway.order import Order

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_CHOICES = 256  # of all prompts together

_NOT_EMPTY: JsonDict = {"minItems": 1, "minLength": 1, "items": {"minItems": 1, "minLength": 1}}
_Prompts = Annotated[Texts, Field(max_length=MAX_PROMPTS)]
_TokenLists = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["prompt"]}, {"required": ["input_ids"]}]})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = unsupported.NEUTRAL_IN_COMPLETIONS

    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = Field(
        None, description=f"most tokens of output of each choice, default {DEFAULT_MAX_TOKENS}; 0 only with echo")
    prompt: str | _Prompts | TokenIds | _TokenLists | None = Field(
        None, description=f"a text, a list of token ids, or at most {MAX_PROMPTS} of either; none may be empty",
        json_schema_extra=_NOT_EMPTY)
    input_ids: TokenIds | _TokenLists | None = Field(
        None, description="in place of prompt, as in SGLang", json_schema_extra=_NOT_EMPTY)
    logprobs: NumLogprobs | None = Field(
        None, description="of each token of output (with echo: and of the prompt), with so many alternatives")
    echo: bool | None = Field(None, description="the prompt comes before the text of each choice; default false")
    add_special_tokens: bool | None = Field(None, description="the model's own, before a text; default true")

    def orders(self, model: ModelFacts, affinity_key: str = "") -> list[Order]:
        """One for each prompt, in their order. Raises `InvalidRequest` or `UnsupportedValue` with `param`."""
        self.check()
        prompts = self._prompts()
        num_choices = len(prompts) * (self.n or 1)
        if num_choices > MAX_CHOICES:
            raise InvalidRequest(
                f"n: {len(prompts)} prompts with n choices each are {num_choices}, the limit is {MAX_CHOICES}",
                param="n")
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.new_orders(
            model, prompts, self.constraint(), affinity_key, max_tokens=max_tokens, echo=self.echo,
            logprobs=None if self.logprobs is False else self.logprobs, add_special_tokens=self.add_special_tokens,
            prompt_param="prompt" if self.input_ids is None else "input_ids")

    def _prompts(self) -> list[str | tuple[int, ...]]:
        """Raises `InvalidRequest` for none, and for one without any content."""
        name, sent = ("prompt", self.prompt) if self.input_ids is None else ("input_ids", self.input_ids)
        if sent is None:
            raise InvalidRequest("prompt: is required", param="prompt")
        if self.prompt is not None and self.input_ids is not None:
            raise InvalidRequest("input_ids: not together with prompt", param="input_ids")
        if isinstance(sent, str):
            prompts: list[str | tuple[int, ...]] = [sent]
        elif not sent or isinstance(sent[0], int):
            prompts = [tuple(cast(list[int], sent))]
        else:
            prompts = [item if isinstance(item, str) else tuple(item) for item in sent if not isinstance(item, int)]
        if not all(prompts):
            raise InvalidRequest(f"{name}: must not be empty", param=name)
        return prompts
