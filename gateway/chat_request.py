"""The body of `/v1/chat/completions`: one order."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from common.errors import InvalidRequest
from common.generation import ModelFacts
from common.grammar import GrammarKind
from common.sampling_params import MAX_LOGPROBS
from common.tokenized import ChatPrompt
from gateway import unsupported
from gateway.field_types import INT32_MAX, WHOLE, TokenIds
from gateway.generation_request import GenerationRequest
from gateway.messages import Messages, chat_prompt
from gateway.order import Order, ToolUse
from gateway.output_parsers import FORCED_PARSER, NONE, Answer, Formats, ToolSpec, tool_grammar
from gateway.structured_output import Constraint
from gateway.tools import ToolChoice, Tools, functions_of, tool_choice

NO_FORMATS = Formats()


class ChatRequest(GenerationRequest):
    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["messages"]}, {"required": ["input_ids"]}]})
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = unsupported.NEUTRAL_IN_CHAT

    messages: Messages | None = Field(None, description="the conversation; required unless input_ids is sent")
    input_ids: Annotated[TokenIds, Field(min_length=1)] | None = Field(
        None, description="the whole prompt as token ids, in place of messages and template, as in SGLang")
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = Field(
        None, description="wins over max_tokens")
    logprobs: bool | None = Field(None, description="of each token of output; default false")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="so many of the likeliest beside each token; only with logprobs: true")
    tools: Tools | None = Field(None, description="functions that the model may call; its template shows them")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (default), required, one function by name, or allowed_tools; of a constraint on "
        "the output: with auto a JSON schema is of what is no call, with calls that have to be made none is applied")
    parallel_tool_calls: bool | None = Field(None, description="false: one call at most; default true")
    reasoning_effort: str | None = Field(
        None, max_length=64, description="for templates that know it; none: no reasoning")
    enable_thinking: bool | None = Field(None, description="for templates that know it")
    include_reasoning: bool | None = Field(None, description="false: the answer is without the reasoning")
    separate_reasoning: bool | None = Field(None, description="false: reasoning stays in the content; default true")
    add_generation_prompt: bool | None = Field(
        None, description="the prompt ends where the assistant begins; default true, unless continue_final_message")
    continue_final_message: bool | None = Field(
        None, description="go on with the final message; default false; not with add_generation_prompt")
    chat_template: Any = Field(None, description="refused: templates come only from the model")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the model's template")

    def orders(self, model: ModelFacts, formats: Formats = NO_FORMATS, affinity_key: str = "") -> list[Order]:
        """The one order. Raises `InvalidRequest` or `UnsupportedValue` with `param`."""
        self.check()
        choice = tool_choice(self.tool_choice, functions_of(self.tools or []))
        constraint = self._constraint(choice, formats)
        prompt, prompt_param = self._prompt(choice)
        max_tokens, max_tokens_param = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None:
            max_tokens, max_tokens_param = self.max_completion_tokens, "max_completion_tokens"
        return self.new_orders(
            model, [prompt], constraint, affinity_key, max_tokens=max_tokens, max_tokens_param=max_tokens_param,
            prompt_param=prompt_param, logprobs=self._num_logprobs(), tools=self._tool_use(choice, formats, constraint),
            reasoning_parser=self._reasoning_parser(formats, constraint), include_reasoning=self.include_reasoning)

    def _prompt(self, choice: ToolChoice) -> tuple[ChatPrompt | tuple[int, ...], str]:
        """The prompt, and the field that it came in."""
        if self.input_ids is not None and self.messages is not None:
            raise InvalidRequest("input_ids: not together with messages", param="input_ids")
        if self.input_ids is None:
            if self.messages is None:
                raise InvalidRequest("messages: is required", param="messages")
            kwargs = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
            if self.reasoning_effort == "none" and self.enable_thinking is None:
                kwargs["enable_thinking"] = False
            known = {name: value for name, value in kwargs.items() if value is not None}
            return chat_prompt(
                self.messages, choice.functions, self.chat_template, {**known, **(self.chat_template_kwargs or {})},
                self.add_generation_prompt, self.continue_final_message), "messages"
        return tuple(self.input_ids), "input_ids"

    def _num_logprobs(self) -> int | None:
        """Alternatives of each token; None: no logprobs."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs: only with logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def _constraint(self, choice: ToolChoice, formats: Formats) -> Constraint | None:
        """What the client asks of its output, what makes it calls, or both: then calls go in JSON, too."""
        asked = self.constraint()
        if not choice.functions or (asked is None and not choice.is_forced):
            return asked
        answer = None
        if asked is not None and not choice.is_forced:
            if asked.grammar.kind is not GrammarKind.JSON_SCHEMA:
                raise InvalidRequest(
                    f"{asked.param}: together with tools that may be called only as a JSON schema; else with "
                    "tool_choice: 'none'", param=asked.param)
            answer = Answer(json.loads(asked.grammar.text), asked.param)
        params = {tool.function.name: f"tools.{i}.function.parameters"
                  for i, tool in enumerate(self.tools or []) if tool.function is not None}
        specs = [ToolSpec(function.name, function.parameters, params[function.name], function.strict is True)
                 for function in choice.functions]
        made = tool_grammar(
            formats.tool_parser, specs, named=choice.named, one_at_most=self.parallel_tool_calls is False,
            answer=answer)
        return Constraint(made.grammar, "tools" if answer is None else answer.param, made.places)

    def _tool_use(self, choice: ToolChoice, formats: Formats, constraint: Constraint | None) -> ToolUse | None:
        parser = formats.tool_parser if constraint is None else FORCED_PARSER
        if not choice.functions or parser == NONE:
            return None
        names = (choice.named,) if choice.named else tuple(function.name for function in choice.functions)
        return ToolUse(parser, names, choice.is_forced, self.parallel_tool_calls is False)

    def _reasoning_parser(self, formats: Formats, constraint: Constraint | None) -> str:
        """None where the client wants it left in, and of a constrained output, which is an answer from its start."""
        is_read = self.separate_reasoning is not False and constraint is None
        return formats.reasoning_parser if is_read and formats.reasoning_parser != NONE else ""
