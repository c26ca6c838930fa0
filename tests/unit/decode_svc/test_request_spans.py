from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common import trace
from common.errors import DeadlineExceeded
from common.generation import FinishReason, Generation, RequestTiming
from common.sampling_params import SamplingParams
from common.span import RecordedSpan
from decode_svc.request_spans import RequestSpans
from engine.outputs import RequestOutput

TRACED = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
MS = 1_000_000


@pytest.fixture
def recorded() -> Iterator[list[RecordedSpan]]:
    spans: list[RecordedSpan] = []
    trace.record_to(spans.append)
    yield spans
    trace.record_to(None)


class Clock:
    """Milliseconds, as the nanoseconds that `RequestSpans` reads."""

    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms * MS


def told(spans: list[RecordedSpan]) -> list[tuple[str, int, int, str]]:
    return [(s.name, s.start_ns // MS, s.end_ns // MS, s.error_type) for s in spans]


def generation(context: dict[str, str] = TRACED, n: int = 1) -> Generation:
    return Generation("r", "m", (1, 2, 3), (), SamplingParams(max_tokens=4, n=n), trace_context=context)


def run(spans: RequestSpans, clock: Clock, *steps: tuple[int, RequestOutput], n: int = 1) -> None:
    """Submitted at 100, ready at 110, then outputs at their times."""
    clock.ms = 100
    spans.submitted(generation(n=n))
    clock.ms = 110
    spans.ready("r")
    for clock.ms, output in steps:
        spans.on_outputs([output, RequestOutput("another", (1,))])


def first(**changes: Any) -> RequestOutput:
    return RequestOutput("r", (5,), num_prompt_tokens=3, num_cached_tokens=2, num_output_tokens=1, **changes)


def last(reason: FinishReason = FinishReason.LENGTH, **changes: Any) -> RequestOutput:
    return RequestOutput("r", (6,), finish_reason=reason, num_output_tokens=2, **changes)


def test_queue_and_prefill_fill_the_time_from_ready_to_the_first_token(recorded: list[RecordedSpan]) -> None:
    clock = Clock()
    spans = RequestSpans(clock)
    run(spans, clock, (200, first(timing=RequestTiming(0.02, 0.06, num_chunks=2))),
        (300, last(timing=RequestTiming(num_steps=7, num_preemptions=1))))
    assert told(recorded) == [("queue", 110, 140, ""), ("prefill", 140, 200, ""), ("decode", 200, 300, "")]
    assert recorded[1].attributes["shoal.prefill.chunks"] == 2
    assert recorded[2].attributes["shoal.decode.steps"] == 7
    assert recorded[2].attributes["shoal.decode.preemptions"] == 1
    assert {format(s.parent.span_id, "016x") for s in recorded if s.parent} == {"b" * 16}
    assert spans.num_live == 0


@pytest.mark.parametrize("timing", [RequestTiming(0.0, 5.0), RequestTiming(9.0, 0.0)])
def test_an_engines_clock_that_disagrees_moves_no_span_out_of_its_place(
    recorded: list[RecordedSpan], timing: RequestTiming
) -> None:
    clock = Clock()
    run(RequestSpans(clock), clock, (200, first(timing=timing)))
    (_, begin, middle, _), (_, second, end, _) = told(recorded)
    assert begin == 110
    assert middle == second
    assert end == 200
    assert begin <= middle <= end


def test_a_request_ends_with_the_last_of_its_choices(recorded: list[RecordedSpan]) -> None:
    clock = Clock()
    run(RequestSpans(clock), clock, (200, first()), (250, last()), (400, last(choice=1)), n=2)
    assert told(recorded)[2:] == [("decode", 200, 400, "")]
    assert recorded[2].attributes["shoal.decode.tokens"] == 4


def test_one_that_ends_before_its_first_token_has_waited_in_vain(recorded: list[RecordedSpan]) -> None:
    clock = Clock()
    spans = RequestSpans(clock)
    run(spans, clock, (200, RequestOutput("r", finish_reason=FinishReason.ERROR, error=DeadlineExceeded("late"))))
    assert told(recorded) == [("queue", 110, 200, DeadlineExceeded.code)]
    assert spans.num_live == 0


def test_an_abort_is_a_cancellation(recorded: list[RecordedSpan]) -> None:
    clock = Clock()
    run(RequestSpans(clock), clock, (200, first()), (250, RequestOutput("r", finish_reason=FinishReason.ABORT)))
    assert told(recorded)[-1] == ("decode", 200, 250, "cancelled")


def test_requests_without_a_recorded_trace_and_refused_ones_are_not_kept(recorded: list[RecordedSpan]) -> None:
    spans = RequestSpans()
    spans.submitted(generation({}))
    spans.submitted(generation({"traceparent": TRACED["traceparent"][:-1] + "0"}))
    assert spans.num_live == 0
    spans.submitted(generation())
    spans.refused("r")
    assert spans.num_live == 0
    assert recorded == []
