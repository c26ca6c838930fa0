from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from common.generation import ModelFacts
from common.grammar import Grammar, GrammarKind
from common.tokenized import ChatPrompt
from gateway.config import GatewayConfig
from gateway.order import Order, ToolUse
from gateway.output_parsers import (
    FORCED_PARSER,
    NONE,
    REASONING_PARSERS,
    TOOL_PARSERS,
    Formats,
    formats_of,
    open_parser,
    reads_special_tokens,
)
from tests.unit.gateway.output_formats.builders import Outcome, read

MODEL = ModelFacts("m", 512, 1_700_000_000)
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
AFTER_TOOL = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def order(
    tools: ToolUse | None = None, reasoning_parser: str = "", grammar: Grammar | None = None, **prompt: Any
) -> Order:
    return Order("r", MODEL, ChatPrompt(**{"messages": [], **prompt}), None, grammar=grammar, tools=tools,
                 reasoning_parser=reasoning_parser)


def outcome(text: str, **asked: Any) -> Outcome:
    parser = open_parser(order(**asked))
    assert parser is not None
    return read(parser, [text])


@pytest.mark.parametrize(("template", "tool_parser", "reasoning_parser"), [
    ("", NONE, NONE),
    ("{{ message['content'] }}" + PROMPT, NONE, NONE),
    # Hermes and Qwen 2.5: JSON between tags.
    ("return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\"name\": <name>}" + PROMPT,
     "hermes", NONE),
    # Qwen 3: the prompt has reasoning closed when it is switched off.
    ("<tool_call>{\"name\"}</tool_call>{{ content.split('</think>')[-1] }}" + PROMPT
     + "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}",
     "hermes", "qwen3"),
    # The same, and open when it is not.
    ("<tool_call>{\"name\"}</tool_call>" + PROMPT
     + "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}",
     "hermes", "qwen3_prompted"),
    # Always open.
    ("<tool_call>{\"name\"}</tool_call>{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}",
     "hermes", "qwq"),
    # Calls as XML in the same tags.
    ("<tool_call>\\n<function=name>\\n<parameter=a>\\n" + PROMPT, NONE, NONE),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}{{ content.split('</think>')[-1] }}"
     "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}", "deepseek", "deepseek_r1"),
    ("{{ '<｜tool▁calls▁begin｜>' }}{% if add_generation_prompt %}{{'<｜Assistant｜>'}}{% if not thinking %}"
     "{{'</think>'}}{% else %}{{'<think>'}}{% endif %}{% endif %}", "deepseek", "deepseek_v3"),
    ("{{- '[TOOL_CALLS] [' }}", "mistral", NONE),
    ("[THINK]inner monologue[/THINK]{{- '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral", "mistral"),
    ("{{- '<|python_tag|>' + tool_call.name }}", "llama3_json", NONE),
    ("{\"name\": function name, \"parameters\": dictionary of argument name and its value}", "llama3_json", NONE),
    ("{{- '<|python_start|>[' }}", "pythonic", NONE),
    ("List of tools: <|tool_list_start|>[<|tool_call_start|>", "pythonic", NONE),
])
def test_the_formats_are_those_of_the_chat_template(template: str, tool_parser: str, reasoning_parser: str) -> None:
    assert formats_of(template) == Formats(tool_parser, reasoning_parser)


def test_a_name_that_is_given_wins_over_the_chat_template() -> None:
    template = "<tool_call>{}</tool_call><think>"
    assert formats_of(template, "pythonic") == Formats("pythonic", "qwen3")
    assert formats_of(template, reasoning_parser="none") == Formats("hermes", NONE)
    assert formats_of("", "mistral", "mistral") == Formats("mistral", "mistral")


@pytest.mark.parametrize("param", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_refused_with_the_names_there_are(param: str) -> None:
    names = TOOL_PARSERS if param == "tool_call_parser" else REASONING_PARSERS
    with pytest.raises(ConfigError, match=f"auto or one of {', '.join(names)}, got 'hermse'") as caught:
        formats_of("", **{param: "hermse"})
    assert caught.value.param == param
    with pytest.raises(ConfigError, match=f"{param}='hermse'.*auto or one of {', '.join(names)}"):
        GatewayConfig.of(**{param: "hermse"})
    for name in ("auto", *names):
        assert getattr(GatewayConfig.of(**{param: name}), param) == name
        formats_of("", **{param: name})


def test_an_order_without_formats_has_no_parser() -> None:
    assert open_parser(order()) is None
    assert open_parser(order(ToolUse(NONE, ("f",)), NONE)) is None


def test_calls_are_read_in_the_orders_format_for_its_tools() -> None:
    assert outcome(f"a {CALL}", tools=ToolUse("hermes", ("f",))) == Outcome("a", "", [("f", "{}")])
    assert outcome(f"a {CALL}", tools=ToolUse("hermes", ("g",))) == Outcome(f"a {CALL}")
    assert outcome(CALL + CALL, tools=ToolUse("hermes", ("f",), one_at_most=True)) == Outcome("", "", [("f", "{}")])


def test_calls_follow_the_reasoning() -> None:
    tools = ToolUse("hermes", ("f",))
    assert outcome(f"<think>b</think>{CALL}", tools=tools, reasoning_parser="qwen3") == Outcome("", "b", [("f", "{}")])
    assert outcome("<think>b</think>a", reasoning_parser="qwen3") == Outcome("a", "b")
    assert outcome("[THINK]b[/THINK]a", reasoning_parser="mistral") == Outcome("a", "b")


@pytest.mark.parametrize(("name", "prompt", "is_inside"), [
    ("qwen3", {}, False),
    ("qwq", {}, True),
    ("qwq", {"messages": AFTER_TOOL}, True),
    ("deepseek_r1", {}, True),
    ("deepseek_r1", {"messages": AFTER_TOOL}, False),
    ("deepseek_r1", {"add_generation_prompt": False}, False),
    ("deepseek_r1", {"add_generation_prompt": False, "continue_final_message": True}, False),
    ("qwen3_prompted", {}, True),
    ("qwen3_prompted", {"template_kwargs": {"enable_thinking": True}}, True),
    ("qwen3_prompted", {"template_kwargs": {"enable_thinking": False}}, False),
    ("deepseek_v3", {}, False),
    ("deepseek_v3", {"template_kwargs": {"thinking": True}}, True),
    ("deepseek_v3", {"template_kwargs": {"thinking": True}, "messages": AFTER_TOOL}, False),
])
def test_an_output_begins_inside_reasoning_where_the_prompt_opened_it(
    name: str, prompt: dict[str, Any], is_inside: bool
) -> None:
    expected = Outcome("a", "b") if is_inside else Outcome("b</think>a")
    assert outcome("b</think>a", reasoning_parser=name, **prompt) == expected


def test_an_output_that_follows_a_grammar_has_no_reasoning() -> None:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, "{}")
    assert open_parser(order(reasoning_parser="deepseek_r1", grammar=grammar)) is None
    forced = ToolUse(FORCED_PARSER, ("f",), is_forced=True)
    assert outcome('{"name": "f", "arguments": {}}', tools=forced, reasoning_parser="deepseek_r1") == Outcome(
        "", "", [("f", "{}")])


def test_markers_that_are_special_tokens_are_asked_for() -> None:
    assert reads_special_tokens(order(ToolUse("mistral", ("f",))))
    assert reads_special_tokens(order(reasoning_parser="mistral"))
    assert not reads_special_tokens(order(ToolUse("hermes", ("f",)), "qwen3"))
    assert not reads_special_tokens(order())
