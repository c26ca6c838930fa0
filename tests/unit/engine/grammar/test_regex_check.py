from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from engine.grammar.regex_check import MAX_NESTED_REPEATS, MAX_REGEX_CHARS, check_regex, nested_repeats


@pytest.mark.parametrize(("regex", "repeats"), [
    ("a{1000}", 1), ("a{9}b{9}", 1), ("a{3}{4}", 12), ("(a{3}){4}", 12), ("(a{3}b{5}){4}", 20),
    ("(?:a{2,3}|b){0,4}", 12), ("(?P<n>a{3}){4,}", 12), ("((a{2}){3}){5}", 30), (r"\((a{3}){4}\)", 12),
    (r"(a{3}\){4})", 1), (r"[(]a{3}[)]{4}", 1), ("[]a{3}(]{4}", 1), ("(a{3})b{4}", 1), ("(a{3})*{4}", 1),
    ("(ab{3}c)x", 1), ("a{3", 1), ("a{99999999999999999999}", 1), (")a{3}){4}", 1), ("", 1)])
def test_repetitions_count_where_they_contain_one_another(regex: str, repeats: int) -> None:
    assert nested_repeats(regex) == repeats


def test_the_limits_are_named() -> None:
    check_regex("a" * MAX_REGEX_CHARS, "pattern")
    with pytest.raises(InvalidRequest, match=f"pattern is too long.*{MAX_REGEX_CHARS}"):
        check_regex("a" * (MAX_REGEX_CHARS + 1), "pattern")
    check_regex("(a{100}){200}", "pattern")
    with pytest.raises(InvalidRequest, match=f"pattern.*{MAX_NESTED_REPEATS}"):
        check_regex("(a{100}){201}", "pattern")
