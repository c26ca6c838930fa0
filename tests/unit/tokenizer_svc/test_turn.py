from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from tokenizer_svc.turn import MAX_TAIL_IDS, PrefixDigest, Turn, scope_of


@given(st.binary(min_size=16, max_size=16), st.lists(st.integers(0, 2**32 - 1), max_size=MAX_TAIL_IDS))
def test_a_turn_comes_back_from_the_wire_as_it_was(before: bytes, tail: list[int]) -> None:
    turn = Turn(scope_of("salt"), before, array("I", tail))
    assert Turn.from_wire(turn.wire()) == turn


@pytest.mark.parametrize("num_bytes", [1, 31, 33, 32 + 4 * MAX_TAIL_IDS + 4])
def test_bytes_that_are_no_turn_are_refused_naming_the_field(num_bytes: int) -> None:
    with pytest.raises(InvalidRequest, match=f"got {num_bytes} bytes") as caught:
        Turn.from_wire(bytes(num_bytes))
    assert caught.value.param == "turn"


@given(st.lists(st.integers(0, 99), max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_the_digest_of_a_prefix_does_not_depend_on_how_it_was_taken(ids: list[int], steps: list[int]) -> None:
    prefix, whole = PrefixDigest(), array("I", ids)
    for end in sorted(min(step, len(ids)) for step in steps):
        prefix.of(whole, end)
    assert prefix.of(whole, len(ids)) == PrefixDigest().of(whole, len(ids))
    assert PrefixDigest().of(array("I", [*ids, 5]), len(ids) + 1) != PrefixDigest().of(whole, len(ids))
