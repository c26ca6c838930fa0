"""What `/openapi.json` says of generation's answers. Written for readers: the bytes themselves are built by hand.

A field with a default may be absent. Tests hold real answers against these models, with no field beyond them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="prompt tokens that were prefix hits")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class AlternativeToken(BaseModel):
    token: str
    logprob: float = Field(description="natural logarithm; -9999 stands for impossible")
    bytes: list[int] | None = Field(None, description="of the token, which may be part of a character")


class TokenLogprob(AlternativeToken):
    top_logprobs: list[AlternativeToken]


class Metrics(BaseModel):
    """Of one request, in milliseconds since it was received."""

    queue_time_ms: float = Field(description="waited at its worker")
    time_to_first_token_ms: float


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None
    refusal: None = None


class RankedToken(BaseModel):
    logprob: float
    rank: int | None = Field(description="1 is the likeliest; null beyond those that were asked for")
    decoded_token: str


# Of each prompt token, by token id: its own and the likeliest; null for the first.
PromptLogprobs = list[dict[str, RankedToken] | None]


class FunctionCall(BaseModel):
    name: str
    arguments: str = Field(description="JSON text")


class AssistantToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = Field(None, description="the same as reasoning")
    tool_calls: list[AssistantToolCall] | None = None


class Choice(BaseModel):
    """What choices of both endpoints have in common; token ids where `return_token_ids` asked for them."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None = Field(description="the stop string or token id that ended it")
    matched_stop: str | int | None = Field(description="the same as stop_reason, as SGLang names it")
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Unix time in seconds")
    model: str
    system_fingerprint: str = Field(description="equal where the same seed gives the same tokens")
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(None, description="by token id; where asked for")
    metrics: Metrics


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for a prompt's first token")
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = Field(None, description="by token id; where asked for")


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Unix time in seconds")
    model: str
    system_fingerprint: str = Field(description="equal where the same seed gives the same tokens")
    choices: list[CompletionChoice] = Field(description="n of the first prompt, n of the second, …")
    usage: Usage
    metrics: Metrics


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(BaseModel):
    """The first of an index has its id, type and name; the rest bring arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


class MessageDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    index: int
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class ChatChunkChoice(ChunkChoice):
    delta: MessageDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice] = Field(description="empty in the chunk that only carries usage")
    usage: Usage | None = None
    metrics: Metrics | None = Field(None, description="beside the usage of the last chunk")


class CompletionChunkChoice(ChunkChoice):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChunk(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice] = Field(description="empty in the chunk that only carries usage")
    usage: Usage | None = None
    metrics: Metrics | None = Field(None, description="beside the usage of the last chunk")
