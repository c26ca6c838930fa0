from __future__ import annotations

import tracemalloc

import pytest

from gateway.output_formats.unread_text import UnreadText


@pytest.mark.parametrize(("text", "marker", "looks"), [
    ("<tool>x", "<tool>", True), ("<t", "<tool>", None), ("<x", "<tool>", False), ("", "<tool>", None),
    ("x<tool>", "<tool>", False)])
def test_a_marker_is_there_is_not_there_or_may_still_come(text: str, marker: str, looks: bool | None) -> None:
    unread = UnreadText()
    unread.add(text)
    looking = unread.looks_at(marker)
    if looks is None:
        next(looking)
        unread.end()
        looks = False
    with pytest.raises(StopIteration) as answer:
        next(looking)
    assert answer.value.value is looks


def test_to_look_at_a_long_text_does_not_copy_it() -> None:
    unread = UnreadText()
    unread.add("x" * 1_000_000)
    unread.take(1)
    tracemalloc.start()
    try:
        with pytest.raises(StopIteration):
            next(unread.looks_at("<tool>"))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
