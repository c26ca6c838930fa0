"""Sends the requests of a run and fills their records.

A run's states: new → running → ended, by itself or by `stop` (Ctrl-C, or its time is up). Each conversation, mostly of
one request, is a task that waits for its arrival, then for a slot below `max_concurrency`, then for the answer, which
has a deadline. Due is the later of arrival and slot, so waiting for a slot is never taken for the client's lag.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from bench.serve.answer import AnswerReader
from bench.serve.connection import Answer, Disconnected, Endpoint
from bench.serve.dataset import by_conversation
from bench.serve.lag import LoopDelay
from bench.serve.options import ServeOptions
from bench.serve.prompts import Prompts
from bench.serve.record import Outcome, RequestRecord
from bench.serve.workloads import BenchRequest
from common.errors import Unavailable

_REFUSALS: Final = (429, 503)
_ERROR_CHARS: Final = 300


class Load:
    """`run` once. `records` and `duration_s` are right after it has ended, in whatever way."""

    def __init__(
        self, options: ServeOptions, endpoint: Endpoint, requests: list[BenchRequest], prompts: Prompts,
        on_done: Callable[[RequestRecord], None] = lambda _record: None,
    ) -> None:
        self._options, self._endpoint, self._prompts, self._requests = options, endpoint, prompts, requests
        self._on_done = on_done
        self._slots = asyncio.Semaphore(options.max_concurrency or len(requests) or 1)
        self._stopping = asyncio.Event()
        self.stopped_by = ""
        self.loop_delay = LoopDelay()
        self.duration_s = 0.0
        self.records = [RequestRecord(index, _length(request), request.output_len, request.group)
                        for index, request in enumerate(requests)]

    def stop(self, why: str) -> None:
        """End the run: what is under way is cut off and counted as interrupted."""
        self.stopped_by = self.stopped_by or why
        self._stopping.set()

    async def run(self) -> None:
        conversations = by_conversation(self._requests)
        first_calls = [self._prompts.encoded(turns[0], (), ()) for turns in conversations]  # not while it is measured
        watcher = asyncio.create_task(self.loop_delay.watch())
        self._start = time.perf_counter()
        tasks = [asyncio.create_task(self._conversation(turns, call))
                 for turns, call in zip(conversations, first_calls, strict=True)]
        try:
            await self._until_ended(asyncio.gather(*tasks))
        finally:
            for task in (*tasks, watcher):
                task.cancel()
            await asyncio.wait({*tasks, watcher})
            self.duration_s = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _until_ended(self, work: asyncio.Future[list[None]]) -> None:
        """Until all is answered, `stop` is called, or the time of the run is up."""
        stopping = asyncio.create_task(self._stopping.wait())
        seconds = self._options.max_seconds
        awaited: set[asyncio.Future[Any]] = {work, stopping}
        try:
            done, _ = await asyncio.wait(
                awaited, timeout=None if math.isinf(seconds) else seconds,
                return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self.stop(f"--max-seconds {seconds:g} are over")
            if work.done():
                work.result()
        finally:
            stopping.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _conversation(self, turns: Sequence[int], call: bytes) -> None:
        due = 0.0
        for number, index in enumerate(turns):
            record, before = self.records[index], turns[:number]
            due += self._requests[index].arrival
            await asyncio.sleep(due - self._now())
            if before:
                try:
                    call = self._prompts.encoded(
                        index, [(self._requests[i], self.records[i]) for i in before], before)
                except Unavailable as error:
                    record.error = error.message
            if not record.error:
                await self._request(record, call, due)
            self._on_done(record)
            if record.outcome is not Outcome.COMPLETED:
                for left in turns[number + 1:]:
                    self.records[left].error = self.records[left].error or "the turn before did not complete"
                    self._on_done(self.records[left])
                return
            due = record.end_s

    async def _request(self, record: RequestRecord, call: bytes, due: float) -> None:
        waits = self._slots.locked()
        async with self._slots:
            record.due_s = max(due, self._now()) if waits else due
            record.queue_s = record.due_s - due
            record.sent_s = self._now()
            record.outcome = Outcome.INTERRUPTED  # unless it ends
            reader = AnswerReader(record)

            def resent() -> None:
                record.num_resent += 1

            try:
                async with asyncio.timeout(self._options.deadline_s):
                    answer = await self._endpoint.ask(
                        call, lambda piece, at: reader.feed(piece, at - self._start), resent)
                record.outcome, record.error = _judged(answer, reader)
                record.status = answer.status
            except TimeoutError:
                record.outcome, record.error = Outcome.ABORTED, f"no end within {self._options.deadline_s:g} s"
            except (Disconnected, OSError) as error:
                if reader.done:  # only the connection's good-bye is missing; a body is fed of a 200 alone
                    record.outcome, record.error = _judged(Answer(200), reader)
                    record.status = 200
                else:
                    record.outcome = Outcome.FAILED
                    record.error = reader.error or f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
            finally:
                record.end_s = self._now()
                reader.end()


def _judged(answer: Answer, reader: AnswerReader) -> tuple[Outcome, str]:
    if answer.status == 200:
        why = reader.end()
        return (Outcome.FAILED, why) if why else (Outcome.COMPLETED, "")
    text = answer.body.decode("utf-8", "replace")[:_ERROR_CHARS]
    return (Outcome.REFUSED if answer.status in _REFUSALS else Outcome.FAILED), f"{answer.status}: {text}"


def _length(request: BenchRequest) -> int:
    return 0 if isinstance(request.prompt, str) else len(request.prompt)
