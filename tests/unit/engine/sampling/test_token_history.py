from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError
from engine.sampling.token_history import TokenHistory

PROMPT = [4, 4, 9]


def _counts(history: TokenHistory) -> dict[int, int]:
    return {int(i): int(n) for i, n in zip(history.ids, history.counts, strict=True) if n}


def _seen(history: TokenHistory) -> set[int]:
    return set(history.ids[history.is_seen].tolist())


@given(outputs=st.lists(st.integers(0, 300), max_size=200), cuts=st.lists(st.integers(0, 200), max_size=20),
       known=st.integers(0, 200))
def test_outputs_are_counted_once_however_they_come(outputs: list[int], cuts: list[int], known: int) -> None:
    all_ids = PROMPT + outputs
    history = TokenHistory(all_ids[: len(PROMPT) + known], len(PROMPT))
    for end in sorted({min(cut, len(outputs)) for cut in cuts} | {len(outputs)}):
        start = min(max(0, end - 7), len(history.output_ids))  # repeats some that are known
        history.learn(len(PROMPT) + start, outputs[start:end])
    assert list(history.output_ids) == outputs
    assert _counts(history) == Counter(outputs)
    assert _seen(history) == set(all_ids)


def test_rows_of_the_prompt_count_nothing() -> None:
    history = TokenHistory(PROMPT, 3)
    history.learn(0, PROMPT)
    history.learn(1, [4, 9, 5])
    assert _counts(history) == {5: 1}


def test_a_known_token_that_comes_again_takes_nothing_back() -> None:
    history = TokenHistory([*PROMPT, 7, 8, 8], 3)
    history.learn(4, [8])
    assert list(history.output_ids) == [7, 8, 8]


def test_another_token_at_a_known_place_takes_back_what_came_after() -> None:
    history = TokenHistory([*PROMPT, 7, 8, 8, 4], 3)
    history.learn(4, [6])
    assert list(history.output_ids) == [7, 6]
    assert _counts(history) == {7: 1, 6: 1}
    assert _seen(history) == {4, 9, 7, 6}


def test_a_gap_is_an_error() -> None:
    with pytest.raises(InternalError, match="skipped"):
        TokenHistory(PROMPT, 3).learn(4, [1])
