from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from opentelemetry import trace as otel_trace

from common import logs, trace
from common.errors import Overloaded
from common.span import NO_SPAN, RecordedSpan, SpanLink

CALLER = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
UNSAMPLED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}


@pytest.fixture
def recorded() -> Iterator[list[RecordedSpan]]:
    spans: list[RecordedSpan] = []
    trace.record_to(spans.append)
    yield spans
    trace.record_to(None)


def test_without_an_exporter_nothing_is_made_and_a_callers_context_passes_through() -> None:
    with trace.attached(CALLER), trace.root("POST") as root, trace.span("inside") as inside:
        assert root is inside is NO_SPAN
        assert trace.carrier(root) == trace.carrier() == CALLER
        assert trace.trace_id() == "a" * 32
        assert trace.sampled_context(CALLER) is None
    trace.span_at("late", 1, 2, {}, parent=None)


def test_baggage_and_state_of_a_client_go_on_only_while_they_are_small() -> None:
    fits = {"baggage": "a=" + "b" * 2000, "tracestate": "v=" + "c" * 200}
    with trace.attached({**CALLER, **fits}):
        assert trace.carrier() == {**CALLER, **fits}
    large = {"baggage": ",".join(f"k{i}={'b' * 90}" for i in range(40)),
             "tracestate": ",".join(f"v{i}={'c' * 90}" for i in range(30))}
    with trace.attached({**CALLER, **large}):
        assert trace.carrier() == {"traceparent": CALLER["traceparent"]}


def test_children_lie_below_the_span_that_is_current_or_named(recorded: list[RecordedSpan]) -> None:
    with trace.root("chat m", trace.SERVER) as root:
        with trace.span("first", attributes={"n": 1}) as first:
            first.put({"m": 2})
        apart = trace.span("apart")
        trace.span("below apart", parent=apart).finish()
        with trace.below(apart), trace.span("too"):
            pass
        apart.finish()
        trace.span_at("told", 10, 30, {}, parent=trace.sampled_context())
    by_name = {span.name: span for span in recorded}
    parents = {name: span.parent.span_id if span.parent else 0 for name, span in by_name.items()}
    ids = {name: span.context.span_id for name, span in by_name.items()}
    assert parents == {"first": ids["chat m"], "apart": ids["chat m"], "below apart": ids["apart"],
                       "too": ids["apart"], "told": ids["chat m"], "chat m": 0}
    assert len({span.context.trace_id for span in recorded}) == 1
    assert by_name["first"].attributes == {"n": 1, "m": 2}
    assert (by_name["told"].start_ns, by_name["told"].end_ns) == (10, 30)
    assert isinstance(root, RecordedSpan)
    assert root.start_ns <= by_name["first"].start_ns <= by_name["first"].end_ns <= root.end_ns
    assert trace.current() is NO_SPAN, "the block was left"


def test_a_callers_trace_goes_on_and_its_decision_is_respected(recorded: list[RecordedSpan]) -> None:
    with trace.attached(CALLER), trace.root("POST"):
        onward = trace.carrier()
    assert onward["traceparent"].startswith(f"00-{'a' * 32}-")
    assert onward["traceparent"] != CALLER["traceparent"]
    assert onward["tracestate"] == "vendor=1"
    assert recorded[0].parent is not None
    assert format(recorded[0].parent.span_id, "016x") == "b" * 16
    recorded.clear()
    trace.record_to(recorded.append, lambda context, *_: bool(
        otel_trace.get_current_span(context).get_span_context().trace_flags))
    with trace.attached(UNSAMPLED), trace.root("POST"), trace.span("inside"):
        assert trace.carrier()["traceparent"].endswith("-00")
        assert trace.trace_id() == "a" * 32
    assert recorded == []


def test_a_trace_that_was_not_chosen_is_not_chosen_anew_by_those_who_are_called(recorded: list[RecordedSpan]) -> None:
    trace.record_to(recorded.append, lambda *_: False)
    with trace.root("POST"):
        sent = trace.carrier()
    trace.record_to(recorded.append)
    with trace.attached(sent), trace.span("route", trace.SERVER):
        pass
    assert recorded == []
    assert sent["traceparent"].endswith("-00")


def test_work_that_belongs_to_no_request_is_not_traced(recorded: list[RecordedSpan]) -> None:
    with trace.span("heartbeat"):
        pass
    assert recorded == []


@pytest.mark.parametrize(("error", "type_"), [
    (Overloaded("full"), Overloaded.code), (asyncio.CancelledError(), "cancelled"), (KeyError("text"), "KeyError")])
def test_what_a_block_raises_is_the_type_of_its_spans_error_and_never_its_text(
    recorded: list[RecordedSpan], error: BaseException, type_: str
) -> None:
    with pytest.raises(type(error)), trace.root("POST"):
        raise error
    assert recorded[0].error_type == type_


def test_a_span_ends_once_and_does_not_fail_afterwards(recorded: list[RecordedSpan]) -> None:
    with trace.root("POST") as root:
        root.finish(end_ns=2**62)
        root.fail("late")
    assert len(recorded) == 1
    assert (recorded[0].end_ns, recorded[0].error_type) == (2**62, "")


def test_links_point_across_traces(recorded: list[RecordedSpan]) -> None:
    with trace.root("kv.put", links=(SpanLink(trace.sampled_context(CALLER), {"why": "x"}),)):  # type: ignore[arg-type]
        pass
    assert format(recorded[0].links[0].context.trace_id, "032x") == "a" * 32
    assert format(recorded[0].context.trace_id, "032x") != "a" * 32


def test_log_lines_name_the_trace_and_the_span(recorded: list[RecordedSpan]) -> None:
    with trace.root("POST") as root:
        assert root.context is not None
        assert logs._ids(None, "info", {}) == {
            "trace_id": format(root.context.trace_id, "032x"), "span_id": format(root.context.span_id, "016x")}
