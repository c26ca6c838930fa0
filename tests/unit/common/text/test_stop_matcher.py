from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.text.stop_matcher import MAX_STOP_CHARS, MAX_STOPS, StopMatcher

LETTERS = st.text("ab🙂", max_size=30)
STOPS = st.lists(st.text("ab🙂", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By definition: the first end of any stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300)
@example(text="aaab", stops=["aab"], cuts=[2], include=False)
@example(text="abababb", stops=["ababb", "b🙂"], cuts=[], include=True)
@given(LETTERS, STOPS, st.lists(st.integers(0, 30)), st.booleans())
def test_text_and_match_follow_the_definition_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = "".join(matcher.feed(text[a:b]) for a, b in itertools.pairwise(edges)) + matcher.finish()
    assert (out, matcher.matched) == expected(text, stops, include)


@given(LETTERS, STOPS)
def test_exactly_the_longest_suffix_that_could_begin_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(map(matcher.feed, text))
    if matcher.matched is None:
        held = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert len(text) - len(out) == max(held, default=0)


def test_a_stop_string_over_several_pieces_never_shows() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.feed(p) for p in ("ABC", "DEFG", "HI", "JKL")] == ["ABC", "", "", ""]
    assert matcher.matched == "DEFGHIJ"
    assert matcher.finish() == ""


def test_held_text_is_released_when_no_stop_string_comes() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert [matcher.feed(p) for p in ("ABC", "DEFG", "X")] == ["ABC", "", "DEFGX"]
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.feed("ABCDEFG") == "ABC"
    assert matcher.finish() == "DEFG"


def test_the_stop_string_is_part_of_the_text_when_asked_for() -> None:
    matcher = StopMatcher(["\n\n"], include_stop=True)
    assert matcher.feed("one\n") + matcher.feed("\ntwo") == "one\n\n"


@pytest.mark.parametrize(
    "stops", [[""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * (MAX_STOPS + 1)], ids=["empty", "long", "many"])
def test_a_bad_stop_is_refused_naming_the_field_and_limit(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=r"stop: .*(64|1024)") as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"
