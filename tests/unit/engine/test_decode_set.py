from __future__ import annotations

from typing import Any

from engine.decode_set import DecodeSet
from engine.request import Request
from engine.step import UNKNOWN_TOKEN
from tests.unit.engine.builders import EOS, ask, prompt, scheme


def member(decoding: DecodeSet, name: str, num_tokens: int, last_length: int = 99, **fields: Any) -> Request:
    """A sequence whose newest token is known and not planned."""
    request = Request(ask(name, prompt(num_tokens, first=ord(name)), **fields), scheme(4))
    request.set_computed(num_tokens - 1)
    request.block_ids = tuple(range(-(-num_tokens // 4)))
    decoding.add(request, last_length)
    return request


def test_a_removed_members_seat_goes_to_the_last_and_every_column_follows() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, b, c = (member(decoding, name, 5 + index) for index, name in enumerate("abc"))
    decoding.take(decoding.plan()[1], [10, 11, 12])
    decoding.remove(a)
    assert (a.seat, c.seat, b.seat, len(decoding), a.num_planned_tokens) == (-1, 0, 1, 2, 5)
    rows, part = decoding.plan()
    assert (list(rows.request_ids), list(rows.token_ids), list(rows.starts)) == (["c", "b"], [12, 11], [7, 6])
    assert (list(rows.output_positions), list(rows.block_ids)) == ([1, 1], [c.block_ids, b.block_ids])
    taken = decoding.take(part, [22, 21])
    assert [(o.request_id, o.new_token_ids, o.num_output_tokens, o.num_computed_tokens) for o in taken.outputs] == [
        ("c", (22,), 2, 8), ("b", (21,), 2, 7)]
    assert taken.outputs == [c.output((22,)), b.output((21,))]
    assert (taken.strays, taken.to_commit, taken.may_end) == ([], [], [])


def test_filled_blocks_are_to_be_committed_some_at_a_time() -> None:
    for block_size, num_planned in ((4, 64), (16, 64), (256, 256)):
        decoding = DecodeSet(4, block_size, EOS)
        member(decoding, "a", 2, last_length=999)
        took = [decoding.take(decoding.plan()[1], [10]).to_commit for _ in range(256)]
        assert took.index([0]) + 2 == num_planned


def test_a_row_planned_before_its_token_is_known_says_so_and_goes_on_by_counts() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a = member(decoding, "a", 5)
    _, first = decoding.plan()
    ahead, second = decoding.plan()
    assert (list(ahead.token_ids), list(ahead.starts), list(ahead.output_positions)) == ([UNKNOWN_TOKEN], [5], [1])
    assert decoding.take(first, [10]).outputs[0].num_output_tokens == 1
    late, _ = decoding.plan()
    assert (list(late.token_ids), list(late.starts)) == ([UNKNOWN_TOKEN], [6])
    assert decoding.take(second, [11]).outputs[0].num_output_tokens == 2
    assert a.token_ids.tolist() == [*prompt(5, first=ord("a")), 10, 11]


def test_what_a_row_draws_for_one_that_left_or_knows_the_token_is_left_to_the_caller() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, b, c = (member(decoding, name, 5) for name in "abc")
    _, part = decoding.plan()
    decoding.remove(a)
    decoding.remove(b)
    for token_id in (30, 31):
        b.append(token_id)
    decoding.add(b, 99)
    taken = decoding.take(part, [2, 2, 12])
    assert (taken.strays, taken.may_end) == ([0, 1], [])
    assert (a.num_tokens, b.token_ids[-2:].tolist(), c.token_ids[-1]) == (5, [30, 31], 12)


def test_rows_are_not_changed_by_later_steps() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, _ = member(decoding, "a", 5), member(decoding, "b", 6)
    rows, part = decoding.plan()
    before = [list(column) for column in (rows.request_ids, rows.token_ids, rows.starts, rows.block_ids)]
    decoding.take(part, [10, 11])
    a.block_ids = (9,)
    decoding.update_table(a)
    decoding.plan()
    decoding.remove(a)
    assert [list(column) for column in (rows.request_ids, rows.token_ids, rows.starts, rows.block_ids)] == before


def test_plans_share_what_did_not_change() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a = member(decoding, "a", 5)
    first, second = decoding.plan()[0], decoding.plan()[0]
    assert first.request_ids is second.request_ids
    assert first.block_ids is second.block_ids
    decoding.update_table(a)
    assert decoding.plan()[0].block_ids is not first.block_ids
    member(decoding, "b", 5)
    assert decoding.plan()[0].request_ids is not first.request_ids


def test_members_at_the_end_of_a_block_are_found_and_their_new_table_is_taken_in() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, _, c = (member(decoding, name, size) for name, size in (("a", 5), ("b", 6), ("c", 9)))
    assert decoding.at_block_end() == [a, c]
    c.block_ids = (7, 8, 9)
    decoding.update_table(c)
    decoding.remove(a)
    rows, _ = decoding.plan()
    assert dict(zip(rows.request_ids, rows.block_ids, strict=True)) == {"b": (0, 1), "c": (7, 8, 9)}


def test_all_that_may_end_are_found_by_end_of_sequence_and_stop_token_and_who_ends_by_length_is_drained() -> None:
    decoding = DecodeSet(4, 4, EOS)
    member(decoding, "a", 5, last_length=7)
    b = member(decoding, "b", 5, stop_token_ids=(30,))
    member(decoding, "c", 5)
    for drawn, ending, drained in (([10, 30, 12], [1], []), ([10, 11, 2], [2], ["a"])):
        _, part = decoding.plan()
        assert [request.request_id for request in decoding.drained()] == drained
        assert decoding.take(part, drawn).may_end == ending
    assert b.token_ids.tolist() == [*prompt(5, first=ord("b")), 30, 11]
