from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_formats.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR
from gateway.parsed import ContentDelta, ToolCallArguments, ToolCallStart
from tests.unit.gateway.output_formats.builders import (
    CALL_LISTS,
    JSON_SPELLINGS,
    PLACES,
    PROPERTY,
    READERS,
    STYLES,
    TEXTS,
    Call,
    Outcome,
    cut,
    in_python,
    parser_of,
    read,
)

SPELLINGS = pytest.mark.parametrize("spelling", JSON_SPELLINGS)
FAMILIES = pytest.mark.parametrize("family", READERS)
PROSE = st.text("abc .\n<[{é😀", max_size=20)


@SPELLINGS
@PROPERTY
@given(CALL_LISTS, STYLES, PLACES, PROSE, PROSE)
def test_calls_come_as_they_were_written_however_the_text_is_cut(
    spelling: str, calls: list[Call], style: dict[str, Any], places: list[int], before: str, after: str
) -> None:
    family, write, may_follow, may_lead = JSON_SPELLINGS[spelling]
    written = [(name, json.dumps(arguments, **style)) for name, arguments in calls]
    before, after = before if may_follow else "", after if may_lead else ""
    before = f"{before}." if before else ""
    text = f"{before} {write(written)}\n.{after}"
    whole = read(parser_of(family), [text])
    assert whole == Outcome(f"{before}\n.{after}".rstrip(), "", written)
    assert read(parser_of(family), cut(text, places)) == whole
    assert read(parser_of(family), list(text)) == whole


@PROPERTY
@given(CALL_LISTS, PLACES)
def test_calls_in_python_come_as_json_however_the_text_is_cut(calls: list[Call], places: list[int]) -> None:
    text = in_python(calls)
    whole = read(parser_of("pythonic"), [text])
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    assert whole.content == ""
    assert read(parser_of("pythonic"), cut(text, places)) == whole
    assert read(parser_of("pythonic"), list(text)) == whole


@FAMILIES
@PROPERTY
@given(st.data(), PLACES)
def test_a_broken_text_is_read_the_same_however_it_is_cut_and_always_ends(
    family: str, data: st.DataObject, places: list[int]
) -> None:
    text = _broken(family, data)
    whole = read(parser_of(family), [text])
    assert read(parser_of(family), cut(text, places)) == whole
    assert read(parser_of(family), list(text)) == whole
    if not whole.calls:
        assert whole.content == text


@FAMILIES
@PROPERTY
@given(st.data(), PLACES)
def test_without_a_known_tool_all_text_is_content_to_the_letter(
    family: str, data: st.DataObject, places: list[int]
) -> None:
    text = _broken(family, data)
    assert read(parser_of(family, ()), cut(text, places)) == Outcome(text)


def _broken(family: str, data: st.DataObject) -> str:
    """Calls of that family with some text put in, left out or doubled; or any text."""
    calls = data.draw(CALL_LISTS)
    written = [(name, json.dumps(arguments)) for name, arguments in calls]
    spellings = [write(written) for reader, write, *_ in JSON_SPELLINGS.values() if reader == family]
    text = data.draw(st.sampled_from([*spellings, *([in_python(calls)] if family == "pythonic" else [])]))
    for _ in range(data.draw(st.integers(0, 3))):
        at, num_chars = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 4))
        text = text[:at] + data.draw(TEXTS) + text[at + num_chars :]
    return text[: data.draw(st.integers(0, len(text)) | st.just(len(text)))]


V3 = f"{CALL}function{SEPARATOR}f\n```json\n{{}}\n```{CALL_END}"


@pytest.mark.parametrize(("family", "text", "content", "calls"), [
    # Content around calls; white space beside them is none.
    ("hermes", 'Well.\n\n<tool_call>{"name": "f"}</tool_call>\n', "Well.", [("f", "{}")]),
    ("hermes", 'a <tool_call>{"name":"f"}</tool_call>\n b ', "a\n b", [("f", "{}")]),
    ("hermes", "only text \n", "only text \n", []),
    ("hermes", " \n", " \n", []),
    # Keys in any order, and those that the API has.
    ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
    ("hermes", '<tool_call>{"type": "function", "id": "x", "name": "f", "arguments": {}}</tool_call>', "",
     [("f", "{}")]),
    # A closing tag that is missing.
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f", "arguments": {"b": 2}}', "",
     [("f", "{}"), ("f", '{"b": 2}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} and text', " and text", [("f", "{}")]),
    # What is no call.
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("hermes", "1 <tool_call>x</tool_call>", "1 <tool_call>x</tool_call>", []),
    ("hermes", '<tool_call>["f"]</tool_call>', '<tool_call>["f"]</tool_call>', []),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}', '<tool_call>{"name": "f", "arguments": "x"}', []),
    ("hermes", '<tool_call>{"name": "f", "args": {}}', '<tool_call>{"name": "f", "args": {}}', []),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", 'x<tool_call>oops <tool_call>{"name": "f"}</tool_call>', "x<tool_call>oops", [("f", "{}")]),
    # A tool that there is not, with what would be a call inside it.
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": "<tool_call>{\\"name\\":\\"f\\"}"}}</tool_call>',
     '<tool_call>{"name": "g", "arguments": {"x": "<tool_call>{\\"name\\":\\"f\\"}"}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>',
     '<tool_call>{"name": "g"}</tool_call>', [("f", "{}")]),
    # Broken only after it was announced: its arguments so far, the rest is content.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>', "oops}}</tool_call>",
     [("f", '{"a": ')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "b": 2}</tool_call>', ', "b": 2}</tool_call>',
     [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "}</tool_call>", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}', '\\x"}}', [("f", '{"a": "')]),
    # Cut off by the token limit.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b\\u00', "", [("f", '{"a": "b\\u00')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru', "", [("f", '{"a": tru')]),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", "text <tool_c", "text <tool_c", []),
    # Control characters in strings, which JSON forbids.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n\t2\x00"}}', "", [("f", '{"a": "1\\n\\t2\\u0000"}')]),
    # Calls begin with the output or with the tag.
    ("llama3_json", '\n {"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", 'So: {"name": "f", "parameters": {}}', 'So: {"name": "f", "parameters": {}}', []),
    ("llama3_json", 'So: <|python_tag|>{"name": "f", "parameters": {}}', "So:", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {}};{"name": "f"} ; ', " ;", [("f", "{}"), ("f", "{}")]),
    ("llama3_json", '{"answer": {"name": "f"}}', '{"answer": {"name": "f"}}', []),
    ("llama3_json", '<|python_tag|>f.call(query="x")', '<|python_tag|>f.call(query="x")', []),
    ("llama3_json", '{"name": "g", "parameters": {}}; {"name": "f"}', '{"name": "g", "parameters": {}};',
     [("f", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}] done', " done", [("f", "{}")]),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}", [("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS]f[ARGS] no", "[TOOL_CALLS]f[ARGS] no", []),
    ("mistral", f"[TOOL_CALLS]{'x' * 5000}[TOOL_CALLS]f[ARGS]{{}}", f"[TOOL_CALLS]{'x' * 5000}", [("f", "{}")]),
    ("deepseek", f"Hm.\n{CALLS}{V3}{CALLS_END}", "Hm.", [("f", "{}")]),
    ("deepseek", f"{CALLS}{CALL}function{SEPARATOR}{{}}{CALL_END}{CALLS_END}", "", [("function", "{}")]),
    ("deepseek", f"{CALLS}{CALLS_END}", f"{CALLS}{CALLS_END}", []),
    ("deepseek", f"{CALLS}{V3}", "", [("f", "{}")]),
    ("deepseek", f"{CALLS}{CALL}g{SEPARATOR}{{}}{CALL_END}\n{V3}{CALLS_END}",
     f"{CALLS}{CALL}g{SEPARATOR}{{}}{CALL_END}", [("f", "{}")]),
    ("deepseek", f"{CALLS}{CALL}tool{SEPARATOR}f\n```json\n{{}}\n```{CALL_END}{CALLS_END}",
     f"{CALLS}{CALL}tool{SEPARATOR}f\n```json\n{{}}\n```{CALL_END}{CALLS_END}", []),
    ("json", '{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("json", 'x {"name": "f"}', 'x {"name": "f"}', []),
    ("json", '[{"name": "f"}, 1]', ", 1]", [("f", "{}")]),
    ("json", '{"name": "f"}\n{"name": "f"}', '\n{"name": "f"}', [("f", "{}")]),
])
def test_what_comes_of_an_output(family: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    expected = Outcome(content, "", calls)
    assert read(parser_of(family), [text]) == expected
    assert read(parser_of(family), list(text)) == expected


@pytest.mark.parametrize(("text", "content", "calls"), [
    ("[f()]", "", [("f", {})]),
    ("\n[ f ( a = 1 , ) , get_weather(a='x') ]\n", "", [("f", {"a": 1}), ("get_weather", {"a": "x"})]),
    ("<|python_start|>[f(a=True)]<|python_end|>", "", [("f", {"a": True})]),
    ("Well. <|tool_call_start|>[f(a=None)]<|tool_call_end|> Done.", "Well. Done.", [("f", {"a": None})]),
    ("[a.b-c(x=-1.5e3, y=1_000, z=.5, w=0x1F, v=5.)]", "",
     [("a.b-c", {"x": -1500.0, "y": 1000, "z": 0.5, "w": 31, "v": 5.0})]),
    ("[f(a=(1, 2), b=(), c=[(3,),], d={1: 2, True: 'x', 'k': {}, })]", "",
     [("f", {"a": [1, 2], "b": [], "c": [[3]], "d": {"1": 2, "true": "x", "k": {}}})]),
    (r"""[f(a='\'"\\\n\x41\u00e9\U0001F600\101\q', b="it's", c='''x'y"''z''', d="")]""", "",
     [("f", {"a": "'\"\\\nA\xe9\U0001F600A\\q", "b": "it's", "c": "x'y\"''z", "d": ""})]),
    ("[f(a='\\ud83d\\ude00', b='one\ntwo', c='x\\\ny')]", "", [("f", {"a": "😀", "b": "one\ntwo", "c": "xy"})]),
    ("[1, 2]", "[1, 2]", []),
    ("[link](http://x)", "[link](http://x)", []),
    ("see [f()]", "see [f()]", []),
    ("[f(1)]", "[f(1)]", []),
    ("[f(a)]", "[f(a)]", []),
    ("[f", "[f", []),
    ("[g(a=[1]), f()]", "[g(a=[1]),", [("f", {})]),
])
def test_what_comes_of_an_output_in_python(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        outcome = read(parser_of("pythonic"), pieces)
        assert [(name, json.loads(arguments)) for name, arguments in outcome.calls] == calls
        assert outcome.content == content


@pytest.mark.parametrize(("text", "content", "arguments"), [
    ("[f(a=1, b=g(2))]", "g(2))]", '{"a": 1, "b": '),
    ("[f(a=1; b=2)]", "; b=2)]", '{"a": 1'),
    ("[f(a=1, 2)]", ", 2)]", '{"a": 1'),
    ("[f(a={1, 2})]", ", 2})]", '{"a": {"1"'),
    ("[f(a=1+2)]", "1+2)]", '{"a": '),
    ("[f(a='\\U99999999')]", "\\U99999999')]", '{"a": "'),
    ("[f(a=['x", "", '{"a": ["x'),
])
def test_a_call_in_python_that_turns_out_broken_keeps_what_it_has(text: str, content: str, arguments: str) -> None:
    assert read(parser_of("pythonic"), [text]) == Outcome(content, "", [("f", arguments)])
    assert read(parser_of("pythonic"), list(text)) == Outcome(content, "", [("f", arguments)])


def test_half_a_surrogate_pair_in_python_is_an_escape_in_json() -> None:
    text = "[f(a='\\U0000d83d\\ud83d')]"
    assert read(parser_of("pythonic"), list(text)) == Outcome("", "", [("f", r'{"a": "\ud83d\ud83d"}')])


@SPELLINGS
def test_with_one_at_most_later_calls_are_left_out_and_text_is_not(spelling: str) -> None:
    family, write, *_ = JSON_SPELLINGS[spelling]
    text = write([("f", '{"a": 1}'), ("get_weather", '{"b": 2}'), ("f", "{}")]) + " The end."
    expected = Outcome(" The end.", "", [("f", '{"a": 1}')])
    assert read(parser_of(family, one_at_most=True), [text]) == expected
    assert read(parser_of(family, one_at_most=True), list(text)) == expected


def test_with_one_at_most_later_calls_in_python_are_left_out() -> None:
    text = "[f(a=1), get_weather(b='x'), f()]"
    assert read(parser_of("pythonic", one_at_most=True), list(text)) == Outcome("", "", [("f", '{"a": 1}')])


@SPELLINGS
def test_arguments_stream_while_they_are_written(spelling: str) -> None:
    family, write, *_ = JSON_SPELLINGS[spelling]
    arguments = json.dumps({"text": "word " * 50, "numbers": list(range(20)), "deep": {"a": [{"b": "\\\n"}]}})
    text, parser, seen = write([("f", arguments)]), parser_of(family), ""
    begin = text.index(arguments)
    for at, char in enumerate(text):
        for delta in parser.push(char):
            if isinstance(delta, ToolCallArguments):
                seen += delta.text
        written = text[begin : at + 1][: len(arguments)]
        assert written.startswith(seen)
        assert len(written) - len(seen) <= 2  # a digit or a backslash that may go on


def test_arguments_in_python_stream_while_they_are_written() -> None:
    parser = parser_of("pythonic")
    assert parser.push("[f(text") == []
    assert parser.push("='a") == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"text": "a')]
    assert [parser.push(char) for char in "word"] == [[ToolCallArguments(0, char)] for char in "word"]
    assert parser.push("\\") == []
    assert parser.push("n', number=1") == [ToolCallArguments(0, '\\n", "number": ')]
    assert parser.push("2)]") == [ToolCallArguments(0, "12}")]


def test_content_streams_at_once_and_a_beginning_of_a_marker_waits() -> None:
    parser = parser_of("hermes")
    assert parser.push("Hello") == [ContentDelta("Hello")]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [ContentDelta(" <toolbox>")]
    assert parser.push("<tool_call>\n") == []
    assert parser.push('{"name": "f", "arguments": {"a"') == [ToolCallStart(0, "f"), ToolCallArguments(0, '{"a"')]


def test_a_call_of_an_unknown_tool_streams_as_the_content_that_it_is() -> None:
    parser = parser_of("hermes")
    assert parser.push('<tool_call>{"name": "nope"') == [ContentDelta('<tool_call>{"name": "nope"')]
    assert parser.push(', "arguments": {"a') == [ContentDelta(', "arguments": {"a')]


@pytest.mark.parametrize(("family", "start", "more"), [
    ("hermes", "", "text "), ("hermes", "", "\n"), ("hermes", "", "<tool_cal"), ("hermes", "<tool_call>", " "),
    ("hermes", "<tool_call>{", '"'), ("hermes", '<tool_call>{"name": "', "f"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "1"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ', "["),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "\\u00e9"),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"a": "', "x"),
    ("mistral", "[TOOL_CALLS]", "f"), ("deepseek", CALLS + CALL + "function" + SEPARATOR, "f"),
    ("pythonic", "[", "f"), ("pythonic", "[f(a='", "\\n'"), ("pythonic", "[f(a=", "1"),
])
def test_what_waits_to_be_looked_at_again_is_bounded(family: str, start: str, more: str) -> None:
    parser = parser_of(family)
    parser.push(start)
    for _ in range(3000):
        parser.push(more)
        assert parser._text.num_here <= 1024
    text = start + more * 3000
    assert read(parser_of(family), [text]) == read(parser_of(family), cut(text, range(0, len(text), 7)))


def test_a_name_longer_than_any_is_no_call() -> None:
    text = f"[{'n' * 3000}()]"
    assert read(parser_of("pythonic"), [text]) == Outcome(text)
