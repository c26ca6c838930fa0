"""A conversation as clients send it, and as the model's template gets it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest, UnsupportedValue
from common.tokenized import ChatPrompt
from gateway.tools import FunctionDefinition, for_template

MAX_MESSAGES = 8192
MAX_PARTS = 1024  # of one message
MAX_CALLS = 128  # of one message
_RESERVED_KWARGS = frozenset({
    "chat_template", "messages", "tools", "documents", "conversation", "tokenize", "add_generation_prompt",
    "continue_final_message", "return_tensors", "return_dict",
})


_ROLES = {"developer": "system", "function": "tool"}  # as templates know them


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True)

    type: str = Field(description="text (or refusal or thinking, in an assistant's turn)")
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: str
    arguments: str | dict[str, Any] | None = Field(None, description="JSON text of an object, or the object")


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: str | None = None
    type: str | None = Field(None, description="function")
    function: CalledFunction


class Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"] = Field(
        description="developer is system, function is tool")
    content: str | Annotated[list[str | ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = Field(
        None, description="a text, or texts and text parts, which are joined by line breaks; null, the empty text, "
        "only in an assistant's or a tool's turn")
    name: str | None = Field(None, description="of who speaks, where the model's template shows it")
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = Field(
        None, description="in an assistant's turn")
    tool_call_id: str | None = Field(None, description="in a tool's turn: the call that it answers")
    refusal: str | None = Field(None, description="in an assistant's turn without content: stands for it")
    reasoning: str | None = Field(None, description="in an assistant's turn, for templates that show it")
    reasoning_content: str | None = Field(None, description="the same as reasoning")


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def chat_prompt(
    messages: Sequence[Message], functions: Sequence[FunctionDefinition], chat_template: Any,
    template_kwargs: Mapping[str, Any], add_generation_prompt: bool | None, continue_final_message: bool | None,
) -> ChatPrompt:
    """The conversation for the model's template.

    Raises `InvalidRequest` or `UnsupportedValue` with the dotted path of the part at fault. A client never brings a
    template: rendering one is running its program.
    """
    if chat_template is not None:
        raise InvalidRequest("chat_template: templates come only from the model", param="chat_template")
    for name in template_kwargs.keys() & _RESERVED_KWARGS:
        raise InvalidRequest(f"chat_template_kwargs.{name}: not allowed here", param=f"chat_template_kwargs.{name}")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message: not together with add_generation_prompt", param="continue_final_message")
    return ChatPrompt(
        messages=[_for_template(m, f"messages.{i}") for i, m in enumerate(messages)],
        tools=[for_template(function) for function in functions],
        add_generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(continue_final_message), template_kwargs=dict(template_kwargs))


def _for_template(message: Message, path: str) -> dict[str, Any]:
    """Absent content is the empty text, which every template can join."""
    out: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role), "content": _text(message, path)}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        out["tool_calls"] = [_call_for_template(call) for call in message.tool_calls]
    if (reasoning := _reasoning(message)) is not None:
        out["reasoning_content"] = reasoning
    return out


def _text(message: Message, path: str) -> str:
    content = message.content
    if content is None:
        if message.role not in ("assistant", "tool", "function"):
            raise InvalidRequest(f"{path}.content: must be a text or a list of parts", param=f"{path}.content")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(
        part if isinstance(part, str) else _part_text(part, f"{path}.content.{i}")
        for i, part in enumerate(content) if not _is_thinking(part, message))


def _reasoning(message: Message) -> str | None:
    """What was sent as such, else the thinking parts of the content."""
    sent = message.reasoning_content if message.reasoning is None else message.reasoning
    if sent is not None or not isinstance(message.content, list):
        return sent
    return "\n".join(part.thinking or "" for part in message.content if _is_thinking(part, message)) or None


def _is_thinking(part: str | ContentPart, message: Message) -> TypeGuard[ContentPart]:
    return not isinstance(part, str) and part.type == "thinking" and message.role == "assistant"


def _part_text(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise UnsupportedValue(f"{path}.type: only text parts are offered by this model", param=f"{path}.type")
    field = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, field)
    if text is None:
        raise InvalidRequest(f"{path}.{field}: must be a text", param=f"{path}.{field}")
    return text


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    """Templates want the arguments as an object; a text that is none (models write such) is passed as it is."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    out: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        out["id"] = call.id
    return out
