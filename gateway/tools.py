"""The tools of a chat as clients send them, and which of them the model may, must or must not call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvalidRequest, UnsupportedValue

MAX_TOOLS = 128
_NOT_THERE = "names a function that is not in tools"


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="1 to 64 letters, digits, _, . or -")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of an object; absent: no parameters")
    strict: bool | None = Field(
        None, description="true: a call that is forced satisfies all of the schema, or is refused; else what can be "
        "enforced of it")


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, json_schema_extra={"required": ["function"]})

    type: str = Field("function", description="function", json_schema_extra={"enum": ["function"]})
    function: FunctionDefinition | None = None


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`functions`: those that may be called, all of them where the client does not say."""

    functions: tuple[FunctionDefinition, ...] = ()
    is_forced: bool = False  # the output is calls and nothing else
    named: str | None = None  # the only function that may be called


def functions_of(tools: Sequence[Tool]) -> tuple[FunctionDefinition, ...]:
    """Raises `InvalidRequest` or `UnsupportedValue` with the dotted path of the part at fault."""
    functions: dict[str, FunctionDefinition] = {}
    for i, tool in enumerate(tools):
        path = f"tools.{i}"
        if tool.type != "function":
            raise UnsupportedValue(f"{path}.type: only 'function' tools are offered", param=f"{path}.type")
        function = tool.function
        if function is None:
            raise InvalidRequest(f"{path}.function: must be an object", param=f"{path}.function")
        if function.name in functions:
            raise InvalidRequest(
                f"{path}.function.name: {function.name!r} is there twice", param=f"{path}.function.name")
        if function.parameters and function.parameters.get("type", "object") != "object":
            path += ".function.parameters"
            raise InvalidRequest(f"{path}: must be the schema of an object", param=path)
        functions[function.name] = function
    return tuple(functions.values())


def for_template(function: FunctionDefinition) -> dict[str, Any]:
    """A tool as the model's template shows it."""
    return {"type": "function", "function": function.model_dump(exclude_none=True)}


def tool_choice(choice: str | dict[str, Any] | None, functions: tuple[FunctionDefinition, ...]) -> ToolChoice:
    """What `choice` makes of `functions`. Raises `InvalidRequest` naming `tool_choice`."""
    if isinstance(choice, dict) and choice.get("type") in ("none", "auto", "required"):
        choice = str(choice["type"])
    if choice == "none":
        return ToolChoice()
    if choice in (None, "auto"):
        return ToolChoice(functions)
    if not functions:
        raise _fault("asks for a tool, but tools is absent or empty")
    if choice == "required":
        return ToolChoice(functions, is_forced=True)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _name_of(choice)
        if name not in {function.name for function in functions}:
            raise _fault(_NOT_THERE)
        return ToolChoice(functions, is_forced=True, named=name)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), functions)
    raise _fault("must be 'none', 'auto', 'required', a named function or allowed_tools")


def _allowed(allowed: Any, functions: tuple[FunctionDefinition, ...]) -> ToolChoice:
    mode, tools = (allowed.get("mode"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise _fault("allowed_tools must have mode 'auto' or 'required', and a list of tools")
    names = {_name_of(tool) for tool in tools}
    if not names <= {function.name for function in functions}:
        raise _fault(_NOT_THERE)
    kept = tuple(function for function in functions if function.name in names)
    if mode == "required" and not kept:
        raise _fault("allowed_tools must name at least one function when its mode is 'required'")
    return ToolChoice(kept, is_forced=mode == "required")


def _name_of(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _fault("a function is named as {\"type\": \"function\", \"function\": {\"name\": \"…\"}}")
    return name


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {what}", param="tool_choice")
