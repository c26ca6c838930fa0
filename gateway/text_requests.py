"""Bodies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest
from common.tokenized import ChatPrompt
from gateway.field_types import TokenIds
from gateway.messages import Messages, chat_prompt
from gateway.tools import Tools, functions_of


class TokenizeRequest(BaseModel):
    """A text (`prompt`) or a conversation (`messages`)."""

    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, max_length=512, description="a name from /v1/models; null: the only one there is")
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = Field(None, description="shown by the model's template")
    add_special_tokens: bool | None = Field(None, description="default true; for a text only")
    return_token_strs: bool | None = Field(None, description="also answer with the tokens as strings; default false")
    add_generation_prompt: bool | None = Field(None, description="default true, unless continue_final_message")
    continue_final_message: bool | None = Field(None, description="leave the final message open; default false")
    chat_template: Any = Field(None, description="refused: templates come only from the model")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the model's template")

    def source(self) -> ChatPrompt | str:
        """What to tokenize. Raises `InvalidRequest` unless exactly one of the two was sent."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt: send either prompt or messages", param="prompt")
        if self.prompt is not None:
            return self.prompt
        return chat_prompt(
            self.messages or [], functions_of(self.tools or []), self.chat_template, self.chat_template_kwargs or {},
            self.add_generation_prompt, self.continue_final_message)


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str | None = Field(None, max_length=512, description="a name from /v1/models; null: the only one there is")
    tokens: TokenIds
