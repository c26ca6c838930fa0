"""What a worker asks of its engine, in the gaps between its own tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from common.generation import Generation
from common.sampling_params import SamplingParams
from decode_svc.admission import KvAdmission
from decode_svc.worker import DecodeWorker, Session
from engine.engine_port import Fetch
from engine.request import EngineRequest


class NotedEngine:
    """Takes what comes and notes it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def submit(self, request: EngineRequest) -> None:
        self.asked.append(("submit", request.request_id))

    def abort(self, request_id: str) -> None:
        self.asked.append(("abort", request_id))

    async def stop(self, timeout_s: float = 10.0) -> None:
        self.asked.append(("stop", ""))


def started(admission: Any = None) -> tuple[NotedEngine, DecodeWorker]:
    engine, worker = NotedEngine(), DecodeWorker("m", lambda _: None, lambda _: None)
    plain = KvAdmission(engine, None, None, lambda _: None, worker.meter, worker.spans,  # type: ignore[arg-type]
                        block_size=16, timeout_s=1.0)
    worker.start(engine, admission or plain)  # type: ignore[arg-type]
    return engine, worker


def generation(**params: Any) -> Generation:
    return Generation("r", "m", (3, 4), (), SamplingParams(max_tokens=4, **params))


@pytest.mark.parametrize("end", [lambda session: session.abort("r"), Session.close], ids=["abort", "close"])
async def test_an_end_right_after_the_admission_reaches_the_engine(end: Callable[[Session], None]) -> None:
    engine, worker = started()
    session = worker.open_session()
    session.submit(generation())
    await asyncio.sleep(0)
    assert worker._admitting["r"].done()  # and its callback has not run
    end(session)
    await asyncio.sleep(0.01)
    assert engine.asked == [("submit", "r"), ("abort", "r")]


async def test_a_stop_waits_for_the_fetches_that_still_read_the_store() -> None:
    class Fetching:
        is_over = False

        async def serve_fetch(self, fetch: Fetch) -> None:
            await asyncio.sleep(0.05)
            self.is_over = True

    fetching = Fetching()
    engine, worker = started(fetching)
    worker.on_fetches([Fetch("r", (b"h" * 16,), (0,), 0)])
    await worker.stop()
    assert engine.asked == [("stop", "")]
    assert fetching.is_over
