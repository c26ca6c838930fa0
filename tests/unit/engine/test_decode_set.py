from __future__ import annotations

from engine.decode_set import DecodeSet
from engine.request import Request
from tests.unit.engine.builders import EOS, ask, prompt, scheme


def member(decoding: DecodeSet, name: str, num_tokens: int, last_length: int = 99, **fields: object) -> Request:
    request = Request(ask(name, prompt(num_tokens, first=ord(name)), **fields), scheme(4))
    request.num_computed_tokens = num_tokens - 1
    request.block_ids = tuple(range(-(-num_tokens // 4)))
    decoding.add(request, last_length)
    return request


def test_a_removed_members_seat_goes_to_the_last_and_every_column_follows() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, b, c = (member(decoding, name, 5 + index) for index, name in enumerate("abc"))
    decoding.advance([10, 11, 12])
    decoding.remove(a)
    assert (a.seat, c.seat, b.seat, len(decoding)) == (-1, 0, 1, 2)
    outputs = decoding.advance([22, 21])
    assert [(o.request_id, o.new_token_ids, o.num_output_tokens, o.num_computed_tokens) for o in outputs] == [
        ("c", (22,), 2, 8), ("b", (21,), 2, 7)]
    assert outputs == [c.output((22,)), b.output((21,))]
    rows = decoding.rows(())
    assert (list(rows.request_ids), list(rows.token_ids), list(rows.starts)) == (["c", "b"], [22, 21], [8, 7])
    assert (list(rows.output_positions), list(rows.block_ids)) == ([2, 2], [c.block_ids, b.block_ids])


def test_rows_are_not_changed_by_later_steps() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, _ = member(decoding, "a", 5), member(decoding, "b", 6)
    rows = decoding.rows(())
    before = [list(column) for column in (rows.request_ids, rows.token_ids, rows.starts, rows.block_ids)]
    decoding.advance([10, 11])
    a.block_ids = (9,)
    decoding.rows([a])
    decoding.remove(a)
    assert [list(column) for column in (rows.request_ids, rows.token_ids, rows.starts, rows.block_ids)] == before


def test_members_at_the_end_of_a_block_are_found_and_their_new_table_is_taken_in() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a, _, c = (member(decoding, name, size) for name, size in (("a", 5), ("b", 6), ("c", 9)))
    assert decoding.at_block_end() == [a, c]
    c.block_ids = (7, 8, 9)
    decoding.remove(a)
    rows = decoding.rows([a, c])
    assert dict(zip(rows.request_ids, rows.block_ids, strict=True)) == {"b": (0, 1), "c": (7, 8, 9)}


def test_all_that_may_end_are_found_by_length_end_of_sequence_and_stop_token() -> None:
    decoding = DecodeSet(4, 4, EOS)
    a = member(decoding, "a", 5, last_length=6)
    b = member(decoding, "b", 5, stop_token_ids=(30,))
    c = member(decoding, "c", 5)
    for drawn, ending in (([10, 11, 12], [a]), ([10, 30, 12], [a, b]), ([10, 11, 2], [a, c])):
        decoding.advance(drawn)
        assert sorted(request.request_id for request in decoding.may_end(drawn)) == [r.request_id for r in ending]
    assert b.token_ids.tolist() == [*prompt(5, first=ord("b")), 11, 30, 11]
