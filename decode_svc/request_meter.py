"""How long requests take on this worker, counted per engine step and per request, never per token.

States of a request here: submitted → (its KV came from elsewhere: `brought`) → first token → ended, or → refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.bucket_counts import BucketCounts
from common.errors import Cancelled, ShoalError, codes
from common.exemplar import exemplar_of
from common.generation import Generation
from common.metrics import ITL_BUCKETS, REQUEST_TIME_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS
from engine.outputs import RequestOutput

_Row = tuple[str, int]  # request id, choice
SOURCES = ("device", "store", "remote", "computed")


@dataclass(slots=True)
class RequestCounts:
    """Since the start. Times in seconds, from the arrival at this worker on."""

    ttft: BucketCounts = field(default_factory=lambda: BucketCounts(TTFT_BUCKETS))
    itl: BucketCounts = field(default_factory=lambda: BucketCounts(ITL_BUCKETS))
    tpot: BucketCounts = field(default_factory=lambda: BucketCounts(ITL_BUCKETS))
    e2e: BucketCounts = field(default_factory=lambda: BucketCounts(REQUEST_TIME_BUCKETS))
    queue: BucketCounts = field(default_factory=lambda: BucketCounts(REQUEST_TIME_BUCKETS))
    prefill: BucketCounts = field(default_factory=lambda: BucketCounts(REQUEST_TIME_BUCKETS))
    decode: BucketCounts = field(default_factory=lambda: BucketCounts(REQUEST_TIME_BUCKETS))
    inference: BucketCounts = field(default_factory=lambda: BucketCounts(REQUEST_TIME_BUCKETS))
    prompt_tokens: BucketCounts = field(default_factory=lambda: BucketCounts(TOKEN_BUCKETS))
    output_tokens: BucketCounts = field(default_factory=lambda: BucketCounts(TOKEN_BUCKETS))
    computed_tokens: BucketCounts = field(default_factory=lambda: BucketCounts(TOKEN_BUCKETS))
    max_tokens: BucketCounts = field(default_factory=lambda: BucketCounts(TOKEN_BUCKETS))
    choices: BucketCounts = field(default_factory=lambda: BucketCounts((1, 2, 5, 10, 20)))
    step_rows: BucketCounts = field(default_factory=lambda: BucketCounts((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)))
    tokens_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    refused: dict[str, int] = field(default_factory=lambda: dict.fromkeys(codes(), 0))  # by error code


@dataclass(slots=True)
class _Live:
    submitted: float
    num_choices: int
    num_open: int  # of them, without an end
    exemplar: dict[str, str] | None
    brought: tuple[int, int, int] | None = None  # prompt tokens from the device, the store, a prefill worker
    first: float = 0.0  # time of the first token; 0 before
    queue_s: float = 0.0


class RequestMeter:
    """Event loop only; `counts` may be read by a scrape. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._without_token: set[str] = set()
        self._rows: set[_Row] = set()  # live ones that had a token in the last step that brought any
        self._last_step = 0.0  # its time
        self._away: dict[_Row, float] = {}  # live ones that had none in it, as after a preemption: their last token
        self.counts = RequestCounts()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submitted(self, generation: Generation) -> None:
        params = generation.params
        self._live[generation.request_id] = _Live(
            self._clock(), params.n, params.n, exemplar_of(generation.trace_context))
        self._without_token.add(generation.request_id)
        self.counts.max_tokens.observe(params.max_tokens)
        self.counts.choices.observe(params.n)

    def brought(self, request_id: str, *, device: int, store: int, remote: int) -> None:
        """Where the prompt's KV came from, in tokens; of a request that was admitted with reserved blocks."""
        live = self._live.get(request_id)
        if live is not None:
            live.brought = (device, store, remote)

    def refused(self, request_id: str, error: ShoalError) -> None:
        """A submitted request ended before the engine had it."""
        self._live.pop(request_id, None)
        self._without_token.discard(request_id)
        self.refused_at_once(error)

    def refused_at_once(self, error: ShoalError) -> None:
        """One that was not even submitted: its id may be that of a live one."""
        if not isinstance(error, Cancelled):
            self.counts.refused[error.code] += 1

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        """All outputs of one step. Each row that has a token now and had one before counts the gap between them."""
        now = self._clock()
        if self._without_token:
            for output in outputs:
                if output.new_token_ids and output.request_id in self._without_token:
                    self._first(output, now)
        rows = {(output.request_id, output.choice) for output in outputs if output.new_token_ids}
        if rows:
            self._gaps(rows, now)
        if outputs:
            self.counts.step_rows.observe(len(outputs))
        for output in outputs:
            if output.finish_reason is not None:
                self._ended(output, now)

    def _gaps(self, rows: set[_Row], now: float) -> None:
        """Rows of the last step as one, those that come back each by itself; all others are at their first token."""
        before, itl = self._rows, self.counts.itl
        num_steady = len(rows & before)
        if num_steady:
            itl.observe(now - self._last_step, num_steady)
        if self._away and num_steady < len(rows):
            for row in rows - before:
                last = self._away.pop(row, None)
                if last is not None:
                    itl.observe(now - last)
        if num_steady < len(before):
            self._away.update(dict.fromkeys(before - rows, self._last_step))
        self._rows, self._last_step = rows, now

    def _first(self, output: RequestOutput, now: float) -> None:
        live = self._live[output.request_id]
        self._without_token.discard(output.request_id)
        live.first, live.queue_s = now, output.queue_s
        self.counts.ttft.observe(now - live.submitted, exemplar=live.exemplar)
        device, store, remote = live.brought or (output.num_cached_tokens, 0, 0)
        computed = max(0, output.num_prompt_tokens - device - store - remote)
        for source, tokens in zip(SOURCES, (device, store, remote, computed), strict=True):
            self.counts.tokens_by_source[source] += tokens
        self.counts.prompt_tokens.observe(output.num_prompt_tokens)
        self.counts.computed_tokens.observe(computed)

    def _ended(self, output: RequestOutput, now: float) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        counts = self.counts
        self._forget((output.request_id, output.choice))
        if live.first:
            counts.output_tokens.observe(output.num_output_tokens)
            if output.num_output_tokens > 1:
                counts.tpot.observe((now - live.first) / (output.num_output_tokens - 1))
        live.num_open -= 1
        if live.num_open > 0 and output.error is None:
            return
        del self._live[output.request_id]
        self._without_token.discard(output.request_id)
        if output.error is not None:
            for choice in range(live.num_choices):
                self._forget((output.request_id, choice))
            self.refused_at_once(output.error)
        elif live.first:
            counts.e2e.observe(now - live.submitted, exemplar=live.exemplar)
            counts.queue.observe(live.queue_s)
            counts.prefill.observe(max(0.0, live.first - live.submitted - live.queue_s))
            counts.decode.observe(now - live.first)
            counts.inference.observe(max(0.0, now - live.submitted - live.queue_s))

    def _forget(self, row: _Row) -> None:
        self._rows.discard(row)
        self._away.pop(row, None)
