"""Workers that fail under a request: it moves on, without gap or repeat, placed by a router or by load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
import pytest

from common.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    ShoalError,
    Unavailable,
    WorkerLost,
)
from common.generation import FinishReason, Generation, TokenDelta, WorkerView
from common.placement import Placement, RequestOutcome, RouteQuery
from gateway import metrics
from tests.fakes import FINGERPRINT, MODEL, FakeDecode, Step
from tests.http_gateway import http_gateway

TEXT = "the lighthouse keeps its light 🙂 through the night"


@dataclass
class FakeRouter:
    """Names the first worker that is not excluded; `refuse` is raised instead."""

    workers: tuple[str, ...] = ("w0", "w1", "w2")
    refuse: Exception | None = None
    queries: list[RouteQuery] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)

    async def route(self, query: RouteQuery) -> Placement:
        self.queries.append(query)
        if self.refuse is not None:
            raise self.refuse
        free = [w for w in self.workers if w not in query.exclude]
        return Placement(free[0], prefill_worker_id="prefill-0", decision_id=f"d{len(self.queries)}")

    async def publish(self, outcome: RequestOutcome) -> None:
        self.outcomes.append(outcome)


def workers(number: int) -> list[WorkerView]:
    return [WorkerView(f"w{i}", MODEL, FINGERPRINT, 512, 8, num_free_blocks=9, incarnation="a") for i in range(number)]


def loses(at: dict[str, int]) -> Any:
    """Each worker goes on after the tokens it is given; those in `at` are lost after so many more."""

    def script(worker_id: str, generation: Generation) -> list[Step]:
        rest = [[b] for b in TEXT.encode()][len(generation.output_token_ids) :]
        return [*rest[: at[worker_id]], WorkerLost(f"{worker_id} was lost")] if worker_id in at else rest

    return script


def streamed(body: bytes) -> tuple[str, list[Any]]:
    events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    chunks = [orjson.loads(e) for e in events if e != "[DONE]"]
    text = "".join(c["text"] for chunk in chunks for c in chunk.get("choices", ()))
    return text, [*chunks, *(e for e in events if e == "[DONE]")]


async def test_a_stream_whose_workers_are_lost_goes_on_from_the_next_with_all_tokens_so_far() -> None:
    decode = FakeDecode(script=loses({"w0": 7, "w1": 33}), workers_=workers(3))
    router = FakeRouter()
    async with http_gateway(decode, router=router) as gateway:
        reply = await gateway.complete("p", max_tokens=200, stream=True, seed=7, return_token_ids=True,
                                       stream_options={"include_usage": True})
        text, chunks = streamed(reply.content)
    assert text == TEXT
    assert chunks[-1] == "[DONE]"
    ids = [t for c in chunks[:-1] for choice in c["choices"] for t in choice.get("token_ids", ())]
    assert bytes(t for t in ids if t < 256).decode() == TEXT
    assert chunks[-2]["usage"]["completion_tokens"] == len(ids)
    assert decode.placed == ["w0", "w1", "w2"]
    assert [g.attempt for g in decode.generations] == [0, 1, 2]
    assert [len(g.output_token_ids) for g in decode.generations] == [0, 7, 40]
    assert {g.params.seed for g in decode.generations} == {7}
    assert [q.exclude for q in router.queries] == [(), ("w0",), ("w0", "w1")]
    assert decode.generations[0].placement is not None
    assert decode.generations[0].placement.prefill_worker_id == "prefill-0"
    [outcome] = router.outcomes
    assert (outcome.attempts, outcome.finish_reason, outcome.decode_worker_id, outcome.decision_id) == (
        3, "stop", "w2", "d3")
    assert outcome.num_output_tokens == len(ids)


async def test_without_a_router_requests_are_placed_by_load_and_still_move_on() -> None:
    decode = FakeDecode(script=loses({"w0": 5}), workers_=workers(2))
    async with http_gateway(decode, router=FakeRouter(refuse=Unavailable("none"))) as gateway:
        reply = await gateway.complete("p", max_tokens=200)
    assert reply.json()["choices"][0]["text"] == TEXT
    assert decode.placed == ["w0", "w1"]


@pytest.mark.parametrize("error", [InternalError("bug"), DeadlineExceeded("late"), InvalidRequest("query")])
async def test_a_router_that_fails_in_any_way_leaves_the_placement_to_load(error: ShoalError) -> None:
    before = metrics.ROUTED_BY_LOAD._value.get()
    async with http_gateway(FakeDecode(script=loses({})), router=FakeRouter(refuse=error)) as gateway:
        assert (await gateway.complete("p", max_tokens=200)).json()["choices"][0]["text"] == TEXT
    assert metrics.ROUTED_BY_LOAD._value.get() == before + 1


async def test_a_router_that_names_an_absent_worker_is_not_believed() -> None:
    decode = FakeDecode(script=loses({}), workers_=workers(1))
    async with http_gateway(decode, router=FakeRouter(workers=("gone",))) as gateway:
        assert (await gateway.complete("p", max_tokens=200)).json()["choices"][0]["text"] == TEXT
    assert decode.placed == ["w0"]


async def test_a_priced_refusal_is_handed_on_with_its_wait() -> None:
    router = FakeRouter(refuse=Overloaded("no placement meets the limits", retry_after_s=3.0))
    async with http_gateway(FakeDecode(workers_=workers(1)), router=router) as gateway:
        reply = await gateway.complete("p")
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "3"
    assert router.outcomes[0].error_code == "server_is_overloaded"


async def test_with_no_worker_left_the_stream_ends_in_one_error_event_in_time() -> None:
    decode = FakeDecode(script=loses({"w0": 7, "w1": 7}), workers_=workers(2))
    async with http_gateway(decode, router=FakeRouter(), worker_wait_s=0.3) as gateway:
        reply = await asyncio.wait_for(gateway.complete("p", max_tokens=200, stream=True), 5)
        text, chunks = streamed(reply.content)
    assert text == TEXT.encode()[:14].decode()
    assert chunks[-1]["error"]["code"] == "worker_lost"
    assert sum("error" in c for c in chunks) == 1


async def test_a_worker_that_comes_back_as_a_new_life_takes_the_stream_up() -> None:
    decode = FakeDecode(script=loses({"w0": 7}), workers_=workers(1))

    async def come_back() -> None:
        while not decode.placed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        decode.script = loses({})
        decode.workers_ = [WorkerView("w0", MODEL, FINGERPRINT, 512, 8, num_free_blocks=9, incarnation="b")]

    async with http_gateway(decode, worker_wait_s=3) as gateway:
        reply, _ = await asyncio.gather(gateway.complete("p", max_tokens=200), come_back())
    assert reply.json()["choices"][0]["text"] == TEXT


async def test_a_begun_stream_goes_on_with_the_worker_it_lost_once_that_is_connected_anew() -> None:
    decode = FakeDecode(script=loses({"w0": 7}), workers_=workers(1))

    async def come_back() -> None:
        while not decode.placed:
            await asyncio.sleep(0.01)
        decode.script = loses({})
        decode.workers_ = [replace(decode.workers_[0], connection=1)]

    router = FakeRouter()
    async with http_gateway(decode, router=router, worker_wait_s=3) as gateway:
        reply, _ = await asyncio.gather(gateway.complete("p", max_tokens=200), come_back())
    assert reply.json()["choices"][0]["text"] == TEXT
    assert [query.exclude for query in router.queries] == [(), ()]


async def test_placements_of_one_request_are_capped() -> None:
    decode = FakeDecode(script=loses({f"w{i}": 0 for i in range(9)}), workers_=workers(9))
    async with http_gateway(decode, max_placements=3) as gateway:
        reply = await gateway.complete("p", max_tokens=200)
    assert reply.status_code == 503
    assert len(decode.placed) == 3


async def test_a_stream_that_gets_on_may_move_as_often_as_workers_are_lost() -> None:
    decode = FakeDecode(script=loses({f"w{i}": 1 for i in range(9)}), workers_=workers(10))
    async with http_gateway(decode, max_placements=3) as gateway:
        reply = await gateway.complete("p", max_tokens=200)
    assert reply.json()["choices"][0]["text"] == TEXT
    assert len(decode.placed) == 10


async def test_a_begun_stream_waits_for_the_only_worker_left_when_that_is_full() -> None:
    full = 3

    def script(worker_id: str, generation: Generation) -> list[Step]:
        nonlocal full
        if worker_id == "w1" and generation.output_token_ids and full:
            full -= 1
            return [Overloaded("full", retry_after_s=1.0)]
        return loses({"w0": 7})(worker_id, generation)  # type: ignore[no-any-return]

    async with http_gateway(FakeDecode(script=script, workers_=workers(2)), worker_wait_s=3) as gateway:
        reply = await gateway.complete("p", max_tokens=200)
    assert reply.json()["choices"][0]["text"] == TEXT
    assert full == 0


async def test_a_worker_that_says_cancelled_is_a_lost_worker_and_never_a_silent_end() -> None:
    def script(worker_id: str, generation: Generation) -> list[Step]:
        if worker_id == "w0":
            return [[*TEXT.encode()[:3]], TokenDelta(
                generation.request_id, (), FinishReason.ERROR, Cancelled("gave it up"))]
        return loses({})(worker_id, generation)  # type: ignore[no-any-return]

    async with http_gateway(FakeDecode(script=script, workers_=workers(2))) as gateway:
        assert (await gateway.complete("p", max_tokens=200)).json()["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_the_outcome_of_a_finished_request_names_no_error(stream: bool) -> None:
    router = FakeRouter()
    async with http_gateway(FakeDecode(script=loses({}), workers_=workers(1)), router=router) as gateway:
        await gateway.complete("p", max_tokens=200, stream=stream)
    [outcome] = router.outcomes
    assert (outcome.finish_reason, outcome.error_code) == ("stop", "")
    assert outcome.ttft_s > 0
