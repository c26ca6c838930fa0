"""An exemplar names a trace only where somebody records it."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from common.exemplar import current_exemplar, exemplar_of

TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
IDS = {"trace_id": "0af7651916cd43dd8448eb211c80319c", "span_id": "b7ad6b7169203331"}


class RecordingSpan(NonRecordingSpan):
    def is_recording(self) -> bool:
        return True


def context(flags: int) -> SpanContext:
    return SpanContext(TRACE_ID, SPAN_ID, is_remote=False, trace_flags=TraceFlags(flags))


def test_a_recording_sampled_span_gives_its_ids() -> None:
    with trace.use_span(RecordingSpan(context(1))):
        assert current_exemplar() == IDS


def test_without_a_recording_or_a_sampled_span_there_is_none() -> None:
    assert current_exemplar() is None
    for span in (NonRecordingSpan(context(1)), RecordingSpan(context(0))):
        with trace.use_span(span):
            assert current_exemplar() is None


def test_a_carrier_gives_them_when_it_is_whole_and_sampled() -> None:
    assert exemplar_of({"traceparent": f"00-{IDS['trace_id']}-{IDS['span_id']}-01"}) == IDS
    for wrong in ("", "00-x-y-01", f"00-{IDS['trace_id']}-{IDS['span_id']}-00", f"00-{IDS['trace_id']}-01"):
        assert exemplar_of({"traceparent": wrong}) is None
    assert exemplar_of({}) is None
