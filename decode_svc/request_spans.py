"""What the engine did for each traced request, as spans: queue, prefill, decode.

The engine knows no traces: it puts its times, as numbers, on the first output of a choice and on its last. States of
a request here: submitted → ready (the scheduler has it; what came before has spans of its own) → first token (queue
and prefill are told) → ended (decode is told), or → refused. Requests whose trace is not recorded are not kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanContext

from common import trace
from common.generation import FinishReason, Generation, RequestTiming
from engine.outputs import RequestOutput


@dataclass(slots=True)
class _Live:
    parent: SpanContext
    num_open: int  # choices without an end
    ready_ns: int
    first_ns: int = 0  # of the first token; 0 before
    num_tokens: int = 0


class RequestSpans:
    """Event loop only. `clock` gives nanoseconds since 1970. Costs nothing per step while nothing is traced."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._without_token: set[str] = set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submitted(self, generation: Generation) -> None:
        parent = trace.sampled_context(generation.trace_context)
        if parent is not None:
            self._live[generation.request_id] = _Live(parent, generation.params.n, self._clock())
            self._without_token.add(generation.request_id)

    def ready(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None and not live.first_ns:
            live.ready_ns = self._clock()

    def refused(self, request_id: str) -> None:
        """It ended before the scheduler had it; the span that was open then has the error."""
        self._live.pop(request_id, None)
        self._without_token.discard(request_id)

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """All outputs of one step."""
        if not self._live:
            return
        now, waiting = self._clock(), self._without_token
        for output in outputs:
            if output.finish_reason is not None or output.request_id in waiting:
                live = self._live.get(output.request_id)
                if live is not None:
                    self._told(live, output, now)

    def _told(self, live: _Live, output: RequestOutput, now: int) -> None:
        ends = output.finish_reason is not None
        error = _error_type(output)
        if not live.first_ns and (output.new_token_ids or ends):
            self._first(live, output, now, "" if output.new_token_ids else error)
        if not ends:
            return
        live.num_open -= 1
        live.num_tokens += output.num_output_tokens
        if live.num_open == 0 or error:
            self.refused(output.request_id)
            if live.first_ns:
                self._last(live, output, now, error)

    def _first(self, live: _Live, output: RequestOutput, now: int, error: str) -> None:
        """Queue and prefill leave no gap between `ready` and now, whatever the engine's clock says."""
        timing = output.timing or RequestTiming(queue_s=output.queue_s)
        admitted = now - int(timing.prefill_s * 1e9) if timing.prefill_s else live.ready_ns + int(timing.queue_s * 1e9)
        admitted = min(now, max(live.ready_ns, admitted))
        started = bool(output.new_token_ids)
        trace.span_at("queue", live.ready_ns, admitted if started else now, {}, parent=live.parent, error=error)
        if started:
            live.first_ns = now
            self._without_token.discard(output.request_id)
            trace.span_at("prefill", admitted, now, {
                "shoal.prefill.prompt_tokens": output.num_prompt_tokens,
                "shoal.prefill.cached_tokens": output.num_cached_tokens, "shoal.prefill.chunks": timing.num_chunks,
            }, parent=live.parent)

    def _last(self, live: _Live, output: RequestOutput, now: int, error: str) -> None:
        timing = output.timing or RequestTiming()
        trace.span_at("decode", live.first_ns, now, {
            "shoal.decode.tokens": live.num_tokens, "shoal.decode.steps": timing.num_steps,
            "shoal.decode.preemptions": timing.num_preemptions,
            "shoal.decode.finish_reason": str(output.finish_reason),
        }, parent=live.parent, error=error)


def _error_type(output: RequestOutput) -> str:
    if output.error is not None:
        return output.error.code
    return "cancelled" if output.finish_reason is FinishReason.ABORT else ""
