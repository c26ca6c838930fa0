from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_formats.call_parser import ContentParser
from gateway.output_formats.reasoning import ReasoningParser
from gateway.parsed import ContentDelta, OutputParser, ReasoningDelta
from tests.unit.gateway.output_formats.builders import PLACES, PROPERTY, Outcome, cut, parser_of, read

TAGS = [("<think>", "</think>"), ("[THINK]", "[/THINK]")]
PROSE = st.text("ab \n<>/[]thinkTHINK", max_size=30)


def think(rest: OutputParser | None = None, *, begins_inside: bool = False) -> ReasoningParser:
    return ReasoningParser("<think>", "</think>", rest or ContentParser(), begins_inside=begins_inside)


@pytest.mark.parametrize("tags", TAGS)
@pytest.mark.parametrize("begins_inside", [False, True])
@pytest.mark.parametrize("is_opened", [False, True])
@PROPERTY
@given(PROSE, PROSE, PLACES)
def test_reasoning_ends_at_its_first_closing_tag_however_the_text_is_cut(
    tags: tuple[str, str], begins_inside: bool, is_opened: bool, reasoning: str, content: str, places: list[int]
) -> None:
    text = f"{tags[0] if is_opened else ''}{reasoning}{tags[1]}{content}"
    whole = read(ReasoningParser(*tags, ContentParser(), begins_inside=begins_inside), [text])
    for pieces in (cut(text, places), list(text)):
        assert read(ReasoningParser(*tags, ContentParser(), begins_inside=begins_inside), pieces) == whole
    if is_opened and tags[1] not in reasoning:
        assert whole == Outcome(content.lstrip("\n"), reasoning.strip("\n"))


@pytest.mark.parametrize(("begins_inside", "text", "reasoning", "content"), [
    (False, "<think>\nWhy?\n\nSo.\n</think>\n\nYes.\n", "Why?\n\nSo.", "Yes.\n"),
    (False, "\n <think>a</think>  b", "a", "  b"),
    (False, "<think></think>b", "", "b"),
    (False, "<think>\n\n</think>\n\nb", "", "b"),
    (False, "b <think>a</think>", "", "b <think>a</think>"),
    (False, "a</think>b", "", "a</think>b"),
    (False, "<thin", "", "<thin"),
    (False, " \n", "", " \n"),
    (False, "", "", ""),
    (False, "<think>a</thi", "a</thi", ""),
    (False, "<think>a\n", "a", ""),
    (False, "<think>a</think><think>b</think>", "a", "<think>b</think>"),
    (True, "a\n</think>\nb", "a", "b"),
    (True, "\n<think>\na</think>b", "a", "b"),
    (True, "a and no end", "a and no end", ""),
    (True, "</think>b", "", "b"),
    (True, "  a</think>b", "  a", "b"),
    (True, "<th", "<th", ""),
    (True, "", "", ""),
])
def test_what_is_reasoning(begins_inside: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert read(think(begins_inside=begins_inside), pieces) == Outcome(content, reasoning)


def test_reasoning_and_content_stream_at_once() -> None:
    parser = think()
    assert parser.push("<think>") == []
    assert parser.push("\nLet me") == [ReasoningDelta("Let me")]
    assert parser.push(" see") == [ReasoningDelta(" see")]
    assert parser.push("\n") == []
    assert parser.push("then</") == [ReasoningDelta("\nthen")]
    assert parser.push("think>\n\n") == []
    assert parser.push("Good") == [ContentDelta("Good")]
    assert parser.push(" day") == [ContentDelta(" day")]
    assert parser.finish() == []


def test_tools_are_called_after_the_reasoning_and_not_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    text = f"<think>\nI could {call}\n</think>\n\nOn it.\n{call}"
    for pieces in ([text], list(text)):
        assert read(think(parser_of("hermes")), pieces) == Outcome("On it.", f"I could {call}", [("f", '{"a": 1}')])


def test_without_reasoning_the_tools_parser_reads_from_the_start() -> None:
    text = '\n{"name": "f", "parameters": {}}'
    for pieces in ([text], list(text)):
        assert read(think(parser_of("llama3_json")), pieces) == Outcome("", "", [("f", "{}")])


@pytest.mark.parametrize("more", ["\n", " ", "a\n", "</think", "<"])
def test_what_waits_to_be_looked_at_again_is_bounded(more: str) -> None:
    parser = think(begins_inside=True)
    for _ in range(2000):
        parser.push(more)
        assert parser._unread.num_here <= len("</think>")
