"""A model's own chat template: validated messages in, prompt text out. A client can never bring a template.

What a template sees is what Hugging Face's `apply_chat_template` shows it: keys without a value are left out, reasoning
under its aliases, the special tokens as variables. Two additions, where templates would fail on valid API input:
tool-call arguments that are JSON text are shown as the object they hold, and a message without content gets ""
if the template cannot do without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from common.errors import InvalidRequest, ModelLoadError, UnsupportedValue
from common.text.model_tokenizer import read_json
from common.text.template_environment import BoundExceeded, ChatEnvironment, Refusal
from common.tokenized import ChatPrompt

MAX_RENDERED_CHARS: Final = 8 << 20
RENDER_TIMEOUT_S: Final = 3.0  # below a caller's ATTEMPT_TIMEOUT_S: it is told, and does not ask elsewhere
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
                              "chat_template", "conversation", "tokenize"})
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_TAIL_MARK: Final = "SHOAL_END_OF_FINAL_MESSAGE "  # the space shows whether the template trims content
_CANNOT_RENDER: Final = "messages: the model's chat template cannot render this conversation"


class ChatTemplate:
    """Immutable; safe from threads. `source` is empty without a template, `tool_source` without one for tools."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tool_source: str = "",
        max_chars: int = MAX_RENDERED_CHARS, timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        """`tool_source` replaces `source` when there are tools. Raises `ModelLoadError` for a syntax error."""
        self.source, self.tool_source = source, tool_source
        self._special_tokens = dict(special_tokens)
        self._max_chars, self._timeout_s = max_chars, timeout_s
        self._environment = ChatEnvironment()
        self._template = self._compile(source) if source else None
        self._tool_template = self._compile(tool_source) if tool_source else self._template

    @staticmethod
    def load(
        folder: Path | str, special_tokens: Mapping[str, str], *, max_chars: int = MAX_RENDERED_CHARS,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> ChatTemplate:
        """chat_template.jinja, else tokenizer_config.json. Raises `ModelLoadError` for one that is broken."""
        sources = _read_sources(Path(folder))
        return ChatTemplate(sources.get("default", ""), special_tokens, tool_source=sources.get("tool_use", ""),
                            max_chars=max_chars, timeout_s=timeout_s)

    def render(self, prompt: ChatPrompt) -> str:
        """Raises `InvalidRequest` for what the template refuses or cannot show, `UnsupportedValue` without one."""
        template = self._tool_template if prompt.tools else self._template
        if template is None:
            raise UnsupportedValue("messages: this model has no chat template; use /v1/completions", param="messages")
        _check_kwargs(prompt.template_kwargs)
        messages = [_shown(message) for message in prompt.messages]
        if not messages:
            raise InvalidRequest("messages: must hold at least one message", param="messages")
        if prompt.continue_final_message:
            return self._render_continued(template, prompt, messages)
        return self._render(template, prompt, messages)

    def _compile(self, source: str) -> Template:
        try:
            return self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelLoadError(f"chat template, line {error.lineno}: {error.message}") from None

    def _render(self, template: Template, prompt: ChatPrompt, messages: Sequence[dict[str, Any]]) -> str:
        variables = {
            **self._special_tokens, **prompt.template_kwargs, "messages": messages,
            "tools": list(prompt.tools) or None, "documents": None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        try:
            return self._environment.render(template, variables, self._max_chars, self._timeout_s)
        except Refusal as error:
            raise InvalidRequest(f"messages: refused by the model's chat template: {error}", param="messages") from None
        except BoundExceeded as error:
            raise InvalidRequest(f"messages: {error}", param="messages") from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
            if all("content" in message for message in messages):
                raise InvalidRequest(_CANNOT_RENDER, param="messages") from None
        return self._render(template, prompt, [{"content": "", **message} for message in messages])

    def _render_continued(self, template: Template, prompt: ChatPrompt, messages: list[dict[str, Any]]) -> str:
        """The text up to the end of the final message's content, without what the template puts after it."""
        if prompt.add_generation_prompt:
            raise InvalidRequest("continue_final_message: cannot be true together with add_generation_prompt",
                                 param="continue_final_message")
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise InvalidRequest("continue_final_message: the final message has no text content to continue",
                                 param="continue_final_message")
        marked = [*messages[:-1], {**messages[-1], "content": content + _TAIL_MARK}]
        text = self._render(template, prompt, marked)
        head, mark, tail = text.rpartition(_TAIL_MARK.strip())
        if not mark or content.strip() not in text:
            raise InvalidRequest("continue_final_message: the model's chat template does not show the final message",
                                 param="continue_final_message")
        return head if tail.startswith(" ") else head.rstrip()


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in _RESERVED:
            raise InvalidRequest(f"chat_template_kwargs: {name!r} cannot be set there", param="chat_template_kwargs")


def _shown(message: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shown[key] for key in _REASONING if key in shown), None)
    if reasoning is not None:
        shown = {"thinking": reasoning, **shown, "reasoning_content": reasoning}
    if isinstance(shown.get("tool_calls"), list):
        shown["tool_calls"] = [_shown_call(call) for call in shown["tool_calls"]]
    return shown


def _shown_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _read_sources(folder: Path) -> dict[str, str]:
    """Template name → source; `default` and, of some models, `tool_use`."""
    sources: dict[str, str] = {}
    listed = read_json(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(listed, str):
        sources["default"] = listed
    elif isinstance(listed, list):
        named = [t for t in listed if isinstance(t, dict) and {"name", "template"} <= t.keys()]
        sources.update({str(t["name"]): str(t["template"]) for t in named})
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    for name, path in files:
        if path.is_file():
            try:
                sources[name] = path.read_text("utf-8")
            except (OSError, ValueError) as error:
                raise ModelLoadError(f"{path}: cannot be read ({error})") from None
    return sources
