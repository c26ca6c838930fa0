"""Which format a model's output is read by, and the parser of one choice.

    the model's chat template, configuration ──formats_of──▶ Formats ──into the order──▶ open_parser
    tools that have to be called, or may be beside an answer of some schema ──tool_grammar──▶ the order's grammar; its
    output is read by `FORCED_PARSER`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import ConfigError
from common.tokenized import ChatPrompt
from gateway.order import Order
from gateway.output_formats.call_parser import CallFormat, CallParser, ContentParser
from gateway.output_formats.deepseek import read_deepseek
from gateway.output_formats.hermes import read_hermes
from gateway.output_formats.json_calls import read_json
from gateway.output_formats.llama3_json import read_llama3_json
from gateway.output_formats.mistral import read_mistral
from gateway.output_formats.pythonic import read_pythonic
from gateway.output_formats.reasoning import ReasoningParser
from gateway.output_formats.tool_grammar import FORCED_PARSER, Answer, ToolSpec, tool_grammar
from gateway.parsed import OutputParser

__all__ = [
    "AUTO", "FORCED_PARSER", "NONE", "REASONING_PARSERS", "TOOL_PARSERS", "Answer", "Formats", "ToolSpec",
    "formats_of", "open_parser", "reads_special_tokens", "tool_grammar"]

AUTO, NONE = "auto", "none"

_CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": read_hermes, "llama3_json": read_llama3_json, "mistral": read_mistral, "pythonic": read_pythonic,
    "deepseek": read_deepseek, FORCED_PARSER: read_json}
_THINK = ("<think>", "</think>")
_REASONING_TAGS = {
    "qwen3": _THINK,  # the model writes both tags
    "qwen3_prompted": _THINK,  # the prompt ends with the opening tag, unless enable_thinking is false
    "qwq": _THINK,  # the prompt ends with it
    "deepseek_r1": _THINK,  # the prompt ends with it, but not after a tool's result
    "deepseek_v3": _THINK,  # the same, and only if thinking is true
    "mistral": ("[THINK]", "[/THINK]"),
}
TOOL_PARSERS = (*_CALL_FORMATS, NONE)
REASONING_PARSERS = (*_REASONING_TAGS, NONE)

_MARKED_BY_SPECIAL_TOKENS = frozenset({"llama3_json", "mistral", "pythonic", "deepseek"})

# Tool format: what its templates hold, and what they do not. The first that fits.
_TOOL_MARKERS = (
    ("mistral", r"\[TOOL_CALLS\]", None),
    ("deepseek", r"<｜tool▁calls▁begin｜>", None),
    ("hermes", r"<tool_call>", r"<function=|<arg_key>"),  # these write calls as XML
    ("pythonic", r"<\|python_start\|>|<\|tool_call_start\|>|\[func_name1\(", None),
    ("llama3_json", r'<\|python_tag\|>|"parameters": dictionary of argument name', None),
)
_PROMPT_OPENS = re.compile(r"<think>(?:\\n|\s)*(?!\\n|\s|</think>)")
_OPENS_IF_THINKING = re.compile(r"\bnot thinking\b")


@dataclass(frozen=True, slots=True)
class Formats:
    """How one model writes: a name of `TOOL_PARSERS` and one of `REASONING_PARSERS`."""

    tool_parser: str = NONE
    reasoning_parser: str = NONE


def formats_of(chat_template: str, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> Formats:
    """By the template's text, where a name is not given. Raises `ConfigError` for a name that there is not."""
    for param, name, names in (("tool_call_parser", tool_call_parser, TOOL_PARSERS),
                               ("reasoning_parser", reasoning_parser, REASONING_PARSERS)):
        if name not in (AUTO, *names):
            raise ConfigError(f"{param}: must be {AUTO} or one of {', '.join(names)}, got {name!r}", param=param)
    return Formats(
        _tool_parser_of(chat_template) if tool_call_parser == AUTO else tool_call_parser,
        _reasoning_parser_of(chat_template) if reasoning_parser == AUTO else reasoning_parser)


def open_parser(order: Order) -> OutputParser | None:
    """A parser for one choice; None: it is all content.

    What follows a grammar from its first token on has no reasoning before it.
    """
    tools, calls = order.tools, None
    if tools is not None and tools.parser in _CALL_FORMATS:
        calls = CallParser(_CALL_FORMATS[tools.parser], tools.names, one_at_most=tools.one_at_most)
    tags = _REASONING_TAGS.get(order.reasoning_parser)
    is_constrained = order.grammar is not None or (tools is not None and tools.is_forced)
    if tags is None or is_constrained:
        return calls
    return ReasoningParser(*tags, calls or ContentParser(), begins_inside=_begins_inside(order))


def reads_special_tokens(order: Order) -> bool:
    """Whether the order's parsers read markers that are special tokens, so that their text must not be skipped."""
    tool_parser = order.tools.parser if order.tools is not None else NONE
    return tool_parser in _MARKED_BY_SPECIAL_TOKENS or order.reasoning_parser in _MARKED_BY_SPECIAL_TOKENS


def _begins_inside(order: Order) -> bool:
    """Whether the prompt ends with the opening tag."""
    prompt = order.prompt
    if not isinstance(prompt, ChatPrompt) or not prompt.add_generation_prompt or prompt.continue_final_message:
        return False
    kwargs = prompt.template_kwargs
    follows_tool = bool(prompt.messages) and prompt.messages[-1].get("role") == "tool"
    match order.reasoning_parser:
        case "qwen3_prompted":
            return kwargs.get("enable_thinking") is not False
        case "deepseek_r1":
            return not follows_tool
        case "deepseek_v3":
            return bool(kwargs.get("thinking")) and not follows_tool
        case name:
            return name == "qwq"


def _tool_parser_of(chat_template: str) -> str:
    for name, has, has_not in _TOOL_MARKERS:
        if re.search(has, chat_template) and not (has_not and re.search(has_not, chat_template)):
            return name
    return NONE


def _reasoning_parser_of(chat_template: str) -> str:
    if "[THINK]" in chat_template:
        return "mistral"
    if not any(tag in chat_template for tag in _THINK):
        return NONE
    _, has_end, end = chat_template.rpartition("add_generation_prompt")
    if not has_end or not _PROMPT_OPENS.search(end):
        return "qwen3"
    if _OPENS_IF_THINKING.search(end):
        return "deepseek_v3"
    if "is_tool" in end:
        return "deepseek_r1"
    return "qwen3_prompted" if "enable_thinking" in end else "qwq"
