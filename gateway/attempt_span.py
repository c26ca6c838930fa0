"""One attempt of a generation in its trace: where it went, its first token, why it ended.

States: placing → running → first token → ended. An attempt that takes over from a lost one links to it with the
reason; the worker's own spans lie below the attempt that they serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from common import trace
from common.cancellation import is_cancelled
from common.placement import Placement
from common.span import NO_SPAN, Span, SpanLink


class AttemptSpan:
    """`placing` around the choice of a worker, then `running(placed)` around the stream of tokens."""

    def __init__(self, number: int, num_tokens_before: int, *, after: AttemptSpan | None) -> None:
        lost = after.span if after is not None else NO_SPAN
        links = (SpanLink(lost.context, {"shoal.reason": lost.error_type}),) if lost.context is not None else ()
        self.span: Span = trace.span("attempt", trace.CLIENT, {
            "shoal.attempt": number, "shoal.tokens_before": num_tokens_before}, links=links)
        self._sent_ns = 0
        self._is_enough = False

    def carrier(self) -> Mapping[str, str]:
        return trace.carrier(self.span)

    @contextmanager
    def placing(self) -> Generator[None, None, None]:
        """What is raised inside is the attempt's end."""
        try:
            with trace.below(self.span):
                yield
        except BaseException as error:
            self._end(error)
            raise

    def running(self, placed: Placement) -> Self:
        """As a context manager: the stream. What is raised inside is the attempt's end, and so is the end of it."""
        if self.span.recording:
            self.span.put({"shoal.decode_worker_id": placed.decode_worker_id,
                           "shoal.prefill_worker_id": placed.prefill_worker_id})
            self._sent_ns = time.time_ns()
        return self

    async def __aenter__(self) -> None:
        return

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)

    def token(self) -> None:
        """A message of the worker's came; the first one ends the wait for it, both hops included."""
        if self._sent_ns:
            trace.span_at("first_token", self._sent_ns, time.time_ns(), {}, parent=self.span.context)
            self._sent_ns = 0

    def enough(self) -> None:
        """All that the reader wants has come: from now on an early end is no fault."""
        self._is_enough = True

    def _end(self, error: BaseException | None) -> None:
        """A reader that has the text it wanted closes the stream early: that is no fault."""
        closed = isinstance(error, GeneratorExit) and not is_cancelled()
        stopped = isinstance(error, GeneratorExit | asyncio.CancelledError) and self._is_enough
        if error is not None and not closed and not stopped:
            self.span.fail(error)
        self.span.finish()
