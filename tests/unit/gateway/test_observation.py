"""What the outermost layer counts of requests that end in an unusual way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from starlette.types import Message, Receive, Scope, Send

from gateway.goodput import SloLimits
from gateway.observation import Observation, Observer, observation
from gateway.order import Usage


def counted(name: str) -> float:
    return REGISTRY.get_sample_value(f"shoal_gateway_slo_{name}_total", {"model": "observed"}) or 0.0


@pytest.mark.parametrize("status", [0, 200])
async def test_a_request_that_the_end_of_the_process_cuts_off_is_not_judged(status: int) -> None:
    reached = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        observation(scope).model = "observed"
        scope["route"] = SimpleNamespace(path="/v1/completions")
        if status:
            await send({"type": "http.response.start", "status": status, "headers": []})
        reached.set()
        await asyncio.sleep(60)

    async def send(_message: Message) -> None:
        """To nobody."""

    scope: dict[str, Any] = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
    before = counted("requests"), counted("good")
    task = asyncio.create_task(Observer(app, SloLimits(1.0, 1.0))(scope, None, send))  # type: ignore[arg-type]
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (counted("requests"), counted("good")) == before
    assert observation(scope).error is not None


def test_the_time_per_token_of_several_choices_is_the_mean_of_their_own_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("gateway.observation.time.perf_counter", lambda: now)
    seen = Observation("x", started=0.0, model="observed")
    for num_tokens, (now, choice) in enumerate(((1.0, 0), (1.5, 1), (2.0, 0), (4.5, 1)), 1):  # noqa: B007
        seen.content(Usage(1, 0, num_tokens), choice)
        assert seen.first_content_s == 1.0
    assert seen.tpot_s == pytest.approx((1.0 + 3.0) / 2)
    seen.content(Usage(1, 0, 5), 2)
    assert seen.tpot_s == pytest.approx((1.0 + 3.0) / 2), "the first token of a choice has no gap"
