from __future__ import annotations

import json
from typing import Any

import pytest

from bench.serve.answer import AnswerReader
from bench.serve.record import Outcome, RequestRecord
from bench.serve.summary import is_good


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def text(content: str) -> bytes:
    return event(choices=[{"text": content}])


def read(*pieces: tuple[bytes, float]) -> tuple[RequestRecord, str]:
    """The record of an answer that was sent at 10 s and ended with its last piece, and why it was not whole."""
    record = RequestRecord(0, 4, 3, sent_s=10.0, end_s=pieces[-1][1])
    reader = AnswerReader(record)
    for piece, at in pieces:
        reader.feed(piece, at)
    return record, reader.end()


DONE = b"data: [DONE]\n\n"


def test_ttft_itl_tpot_and_e2e_of_known_times() -> None:
    record, why = read(
        (b": ping\n\n", 10.1), (text("a"), 10.5), (text("b"), 10.7), (text("c") + text("d"), 11.1),
        (event(choices=[{"text": "", "finish_reason": "length"}]), 11.2),
        (event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 7}) + DONE, 11.3))
    assert why == ""
    assert record.ttft_s == pytest.approx(0.5)
    assert record.itls_s == pytest.approx([0.2, 0.4, 0.0])
    assert record.tpot_s == pytest.approx(0.6 / 6), "by the server's count of tokens, not by chunks"
    assert record.e2el_s == pytest.approx(1.3)
    assert (record.output_len, record.input_len, record.text) == (7, 9, "abcd")


def test_without_usage_each_chunk_counts_as_a_token() -> None:
    record, _ = read((text("a"), 11.0), (text("b"), 12.0), (DONE, 12.5))
    assert (record.output_len, record.tpot_s) == (2, 1.0)


def test_a_single_token_has_no_tpot_and_meets_any_limit_of_it() -> None:
    record, _ = read((text("a"), 11.0), (event(choices=[], usage={"completion_tokens": 1}) + DONE, 12.5))
    assert record.tpot_s is None
    record.outcome = Outcome.COMPLETED
    assert is_good(record, {"tpot": 0.001, "ttft": 1000.0})
    assert not is_good(record, {"ttft": 999.0})


def test_an_answer_whose_tokens_have_no_text_is_timed_by_its_finish() -> None:
    record, why = read((event(choices=[{"text": "", "finish_reason": "length"}]), 11.0), (DONE, 11.5))
    assert (why, record.ttft_s) == ("", 1.0)


@pytest.mark.parametrize(("pieces", "why"), [
    ([text("a")], "without [DONE]"),
    ([DONE], "no content"),
    ([text("a"), event(error={"code": "worker_lost", "message": "gone"}), DONE], "worker_lost: gone"),
    ([text("a"), event(object="error", message="flat"), DONE], "flat"),
    ([b"data: nonsense\n\n", DONE], "cannot be read"),
])
def test_an_answer_that_is_not_whole_says_why(pieces: list[bytes], why: str) -> None:
    assert why in read(*((piece, 11.0) for piece in pieces))[1]


def test_times_and_cached_tokens_that_the_server_reports_are_kept() -> None:
    record, _ = read((text("a"), 11.0), (event(
        choices=[], metrics={"queue_time_ms": 20, "time_to_first_token_ms": 150},
        usage={"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}) + DONE, 12.0))
    assert (record.server_queue_s, record.server_ttft_s, record.num_cached_tokens) == (0.02, 0.15, 3)
