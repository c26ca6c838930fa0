from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from common.errors import InvalidRequest, ModelLoadError, UnsupportedValue
from common.text.chat_template import ChatTemplate
from common.text.model_tokenizer import ModelTokenizer
from common.tokenized import ChatPrompt
from tests.unit.common.text import folders

USER = {"role": "user", "content": "What is 2+2?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é<b>", "n": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be short."}, USER],
    [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "日本語 🙂 <|im_end|> {{ 7*7 }}"}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "line\n\n  indented\t"}, {"role": "assistant", "content": "x", "name": None}],
]
# Uses what current templates use: tools, tool calls, tojson, namespace, loop controls, generation, reasoning.
RICH = """{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}
{%- set ns = namespace(last='') %}
{% for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {{- bos_token + m.role }}:
    {%- if m.content is defined %}{{ m.content }}{% endif %}
    {%- if m.reasoning_content is defined %}[{{ m.reasoning_content }}]{% endif %}
    {%- for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}
    {%- if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}
    {%- set ns.last = m.role %}
{% endfor %}
{{- ns.last }}{% if mood is defined %}{{ mood }}{% endif %}{% if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> ModelTokenizer:
    return ModelTokenizer.load(smollm2)


@pytest.fixture(scope="module")
def real_template(smollm2: Path, tokenizer: ModelTokenizer) -> ChatTemplate:
    return ChatTemplate.load(smollm2, tokenizer.special_tokens)


def load(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, ModelTokenizer.load(folder).special_tokens)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompted", [True, False])
def test_the_real_model_gets_the_tokens_that_transformers_gives(
    reference: Any, tokenizer: ModelTokenizer, real_template: ChatTemplate, messages: list[dict[str, Any]],
    prompted: bool,
) -> None:
    text = real_template.render(ChatPrompt(messages, add_generation_prompt=prompted))
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompted)
    ids = reference.apply_chat_template(messages, add_generation_prompt=prompted, return_dict=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_null_content_beside_tool_calls_reads_as_empty_content(reference: Any, real_template: ChatTemplate) -> None:
    def chat(content: str | None) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "content": content, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]

    text = real_template.render(ChatPrompt(chat(None)))
    assert text == reference.apply_chat_template(
        chat(""), tokenize=False, add_generation_prompt=True)
    assert "None" not in text


@pytest.mark.parametrize("content", ["4", "so ", "x"])
def test_a_continued_final_message_is_as_in_transformers(
    reference: Any, real_template: ChatTemplate, content: str
) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert real_template.render(prompt) == reference.apply_chat_template(
        messages, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize("messages", [
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "ok"}],
    [{"role": "skip", "content": "no"}, {"role": "assistant", "content": "a", "reasoning": "because"}],
])
@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_rich_template_renders_as_in_transformers(
    reference: Any, tokenizer: ModelTokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    parsed = json.loads(json.dumps(messages))
    for message in parsed:
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    expected = reference.apply_chat_template(
        parsed, tools=tools or None, chat_template=RICH, tokenize=False, add_generation_prompt=True, mood=":)")
    template = ChatTemplate(RICH, tokenizer.special_tokens)
    assert template.render(ChatPrompt(messages, tools, template_kwargs={"mood": ":)"})) == expected


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "add_generation_prompt"])
def test_a_client_cannot_bring_a_template_or_replace_the_conversation(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        ChatTemplate("x", {}).render(ChatPrompt([USER], template_kwargs={name: "{{ 7 * 7 }}"}))
    assert caught.value.param == "chat_template_kwargs"


def test_what_a_client_writes_is_never_run_as_a_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(ChatPrompt([{"role": "user", "content": "{{ 7 * 7 }}"}])) == "{{ 7 * 7 }}"


@pytest.mark.parametrize(("source", "said"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[0].nothing.at_all }}", "cannot render"),
    ("{{ 1 + 'a' }}", "cannot render"),
    ("{{ 1 / 0 }}", "cannot render"),
    ("{{ messages.append(1) }}", "cannot render"),
    ("{{ ''.__class__.__mro__ }}", "cannot render"),
    ("{% set n = namespace(__x=1) %}", "cannot render"),
    ("{% for i in range(10000000) %}x{% endfor %}", "cannot render"),
    ("{% for i in range(90000) %}{{ 'y' * 100 }}{% endfor %}", "longer than 100000 characters"),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.2 s"),
    ("{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "longer than 0.2 s"),
    ("{% set r = range(99999) %}{% for i in r %}{% for j in r if j < 0 %}{% endfor %}{% endfor %}", "longer than 0."),
])
def test_a_template_that_refuses_fails_or_runs_away_is_a_clear_error_on_messages(source: str, said: str) -> None:
    template = ChatTemplate(source, {}, max_chars=100_000, timeout_s=0.2)
    with pytest.raises(InvalidRequest, match=said) as caught:
        template.render(ChatPrompt([USER]))
    assert caught.value.param == "messages"


def test_empty_messages_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        ChatTemplate("x", {}).render(ChatPrompt([]))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    template = load(folders.write_folder(tmp_path, template=""))
    assert template.source == ""
    with pytest.raises(UnsupportedValue, match="no chat template"):
        template.render(ChatPrompt([USER]))


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    folder = folders.write_folder(tmp_path, template="")
    config = {"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = load(folder)
    assert template.render(ChatPrompt([USER])) == "plain"
    assert template.render(ChatPrompt([USER], [TOOL])) == "tools"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "one"}')
    assert load(folder).render(ChatPrompt([USER], [TOOL])) == "one"
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder).render(ChatPrompt([USER])) == "file"


def test_a_template_with_a_syntax_error_stops_the_load_naming_the_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        load(folders.write_folder(tmp_path, template="ok\n{% if %}"))
