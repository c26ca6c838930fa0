"""A trace as text: from spans that a real stack has exported, and from made ones.

`recorded_spans.jsonl` is two requests of one prompt to the small real model: for the first, decode loads what the
store has and a prefill worker sends the rest; for the second all is in the cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.errors import InvalidRequest, NotFound
from stack.__main__ import app
from stack.otlp_spans import TraceSpan, one_trace, read_spans
from stack.waterfall import waterfall

RECORDED = Path(__file__).with_name("recorded_spans.jsonl")
MS = 1_000_000


def span(span_id: str, parent_id: str, name: str, start_ms: float, end_ms: float, where: str = "gateway-0",
         **attributes: object) -> TraceSpan:
    return TraceSpan("t", span_id, parent_id, name, where, int(start_ms * MS), int(end_ms * MS), attributes)


def recorded() -> list[TraceSpan]:
    return read_spans(RECORDED.read_text().splitlines(keepends=True), "recorded")


def shown(*argv: str, stdin: str | None = None) -> list[str]:
    result = CliRunner().invoke(app, ["trace", *argv], input=stdin)
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_a_handed_off_request_is_drawn_with_all_of_its_stages() -> None:
    lines = shown(str(RECORDED), "--request-id", "shown")
    stages = [line.split()[0] for line in lines[2:]]
    assert stages[:4] == ["text_completion", "gateway.parse", "tokenize", "attempt"]
    assert {"route", "kv.reserve", "kv.lookup", "kv.transfer", "kv.get", "queue", "prefill", "decode",
            "detokenize", "outcome"} <= set(stages)
    by_name = {line.split()[0]: line for line in lines[2:]}
    assert "to=prefill-0>decode-0" in by_name["route"]
    assert "router-0" in by_name["route"], "who was called, on the one line of both ends"
    assert stages.count("route") == stages.count("tokenize") == 1
    assert any("from=store" in line for line in lines)
    assert any("from=prefill-0" in line for line in lines)


def test_it_fits_into_100_columns_and_as_many_lines_as_are_asked_for() -> None:
    full = shown(str(RECORDED), "--request-id", "shown")
    assert max(map(len, full)) <= 100
    short = shown(str(RECORDED), "--request-id", "shown", "--lines", "14")
    assert len(short) == 14
    assert short[-1].startswith(f"and {len(full) - 13} spans of at most ")
    assert [line for line in full if line in short] == short[:-1], "in the same order"
    assert len(shown(str(RECORDED), "--request-id", "shown", "--lines", str(len(full)))) == len(full)


def test_the_newest_request_is_drawn_and_others_are_found_by_each_of_their_ids() -> None:
    spans = recorded()
    newest = one_trace(spans)[0].trace_id
    root = next(s for s in spans if s.attributes.get("shoal.client_request_id") == "shown")
    answered = root.attributes["gen_ai.response.id"]
    assert root.trace_id != newest
    assert shown("-", stdin=RECORDED.read_text())[0] == f"trace {newest}"
    for request_id in ("shown", answered, f"cmpl-{answered}", root.trace_id):
        assert {s.trace_id for s in one_trace(spans, request_id)} == {root.trace_id}


def test_bars_stand_where_their_spans_are_in_time() -> None:
    lines = waterfall([span("a", "", "root", 0, 100), span("b", "a", "first", 0, 25), span("c", "a", "then", 25, 100),
                       span("d", "a", "end", 100, 100)], 20)
    bars = [line[49:73].rstrip() for line in lines[2:]]
    assert bars == ["█" * 24, "█" * 6, " " * 6 + "█" * 18, " " * 23 + "▏"]
    assert lines[3].split()[:4] == ["first", "gateway-0", "0.0", "25.0"]


def test_both_ends_of_a_call_are_one_line_with_the_callers_times_and_the_children_of_both() -> None:
    lines = waterfall([
        span("a", "", "root", 0, 50), span("b", "a", "call", 10, 40), span("c", "b", "call", 12, 38, "other-0"),
        span("d", "c", "inside", 20, 30, "other-0"), span("e", "b", "call", 15, 16)], 20)
    assert [line.split()[:4] for line in lines[2:]] == [
        ["root", "gateway-0", "0.0", "50.0"], ["call", "other-0", "10.0", "30.0"], ["call", "gateway-0", "15.0", "1.0"],
        ["inside", "other-0", "20.0", "10.0"]]
    assert lines[-1].startswith("  inside")


def test_a_trace_that_a_client_began_and_one_of_no_length_are_drawn() -> None:
    (line,) = waterfall([span("a", "of the client", "root", 5, 5)], 3)[2:]
    assert line.split()[:4] == ["root", "gateway-0", "0.0", "0.0"]


def test_what_is_no_otlp_is_named_with_its_line_but_a_line_being_written_is_left_out() -> None:
    line = RECORDED.read_text().splitlines(keepends=True)[0]
    assert len(read_spans([line, "\n", line[:40]], "x")) == len(read_spans([line], "x")) > 0
    bad_time = line.replace('"startTimeUnixNano":"1', '"startTimeUnixNano":"x')
    for wrong in ("{}\n", "no json\n", '{"resourceSpans": 3}\n', bad_time):
        with pytest.raises(InvalidRequest, match="x, line 2: not OTLP JSON"):
            read_spans([line, wrong], "x")


def test_a_missing_file_and_an_unknown_request_end_with_one_line_that_names_them() -> None:
    for argv, why in ((["nowhere.jsonl"], "nowhere.jsonl: no such file"),
                      ([str(RECORDED), "--request-id", "nobody"], "no span of a request nobody among")):
        result = CliRunner().invoke(app, ["trace", *argv])
        assert result.exit_code == 1
        assert why in result.output
    with pytest.raises(NotFound, match="no span of a request among 0 spans"):
        one_trace([])
