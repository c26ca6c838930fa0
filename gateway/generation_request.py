"""What chat and completions have in common, beside how tokens are drawn and what shape the output has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from common.generation import ModelFacts
from common.tokenized import ChatPrompt
from gateway import unsupported
from gateway.field_types import INT32_MAX, WHOLE, Key
from gateway.order import Order, PromptEntries, new_request_id
from gateway.sampling_fields import SamplingFields
from gateway.structured_output import Constraint, ConstraintFields
from gateway.word_ids import WordIds

# Lower runs first. A request that says `priority` itself has that.
PRIORITY_OF_TIER = {"priority": -10, "flex": 10}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(None, description="a last chunk without choices has the token counts")
    continuous_usage_stats: bool | None = Field(None, description="with include_usage: every chunk has them")


class GenerationRequest(SamplingFields, ConstraintFields):
    model_config = ConfigDict(strict=True, extra="allow")
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str | None = Field(None, max_length=512, description="a name from /v1/models; null: the only one there is")
    stream: bool | None = Field(None, description="answer with server-sent events; default false")
    stream_options: StreamOptions | None = Field(None, description="only with stream: true")
    return_token_ids: bool | None = Field(None, description="also answer with token ids, as vLLM does")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="name tokens in logprobs token_id:ID, so that those which are no whole text differ")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = Field(
        None, json_schema_extra={"not": {"const": 0}},
        description="keep only so many of the prompt's last tokens, at least 1; -1: what the context leaves")
    cache_salt: Key | None = Field(None, description="prefix hits only among requests of one salt")
    extra_key: Key | None = Field(None, description="joins cache_salt, as in SGLang")
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None = Field(
        None, description="lower runs first; default 0, or that of service_tier")
    service_tier: str | None = Field(
        None, max_length=64, description="flex waits for others, priority goes before them; any other is of no effect")
    prompt_cache_key: Key | None = Field(
        None, description="requests of one key are placed together where that costs nothing")
    session_id: Key | None = Field(None, description="the same, where there is no prompt_cache_key")

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
        if self.streams and self.prompt_logprobs is not None and self.prompt_logprobs is not False:
            raise InvalidRequest("prompt_logprobs: not together with stream: true", param="prompt_logprobs")

    def new_orders(
        self, model: ModelFacts, prompts: Sequence[ChatPrompt | str | tuple[int, ...]], constraint: Constraint | None,
        affinity_key: str, **own: Any,
    ) -> list[Order]:
        """One for each prompt. `affinity_key` is that of the request's headers: the body's comes before it. None among
        `own` is as good as absent.
        """
        sent = {
            **self.sampling(), "max_tokens": None,
            "return_token_ids": self.return_token_ids, "return_tokens_as_token_ids": self.return_tokens_as_token_ids,
            "cache_salt": self._salt(), "priority": self._priority(),
            "affinity_key": self.prompt_cache_key or self.session_id or affinity_key,
            **(_of_constraint(constraint) if constraint else {}), **own}
        max_tokens = sent.pop("max_tokens")
        sent["truncate_prompt_tokens"] = self._truncated_to(model, max_tokens)
        sent |= {"prompt_entries": PromptEntries(), "word_ids": WordIds()}
        given = {name: value for name, value in sent.items() if value is not None}
        orders = [
            Order(request_id=new_request_id(), model=model, prompt=prompt, max_tokens=max_tokens, **given)
            for prompt in prompts]
        orders[0].sampling_params(INT32_MAX if max_tokens is None else max_tokens or int(orders[0].echo))
        return orders

    def _priority(self) -> int | None:
        return PRIORITY_OF_TIER.get(self.service_tier or "") if self.priority is None else self.priority

    def _salt(self) -> str | None:
        """No two pairs of salt and key make the same: the first NUL parts them."""
        if "\0" in (self.cache_salt or ""):
            raise InvalidRequest("cache_salt: must have no NUL character", param="cache_salt")
        return f"{self.cache_salt or ''}\0{self.extra_key}" if self.extra_key else self.cache_salt

    def _truncated_to(self, model: ModelFacts, max_tokens: int | None) -> int | None:
        """-1 stays where the output has no limit of its own."""
        asked = self.truncate_prompt_tokens
        if asked == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens: must be at least 1, or -1", param="truncate_prompt_tokens")
        if asked != -1 or max_tokens is None:
            return asked
        return max(1, model.max_model_len - max(1, max_tokens))


def _of_constraint(constraint: Constraint) -> dict[str, Any]:
    return {"grammar": constraint.grammar, "grammar_param": constraint.param, "grammar_places": constraint.places}
