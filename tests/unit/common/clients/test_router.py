from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from common import rpc
from common.bus import MemoryBus
from common.clients.router import RouterClient
from common.clients.router_wire import (
    OUTCOME_SUBJECT,
    outcome_from,
    outcome_to_proto,
    placement_from,
    placement_to_proto,
    query_from,
    query_to_proto,
)
from common.directory import Directory
from common.errors import InvalidRequest, Overloaded, Unavailable
from common.placement import Placement, RequestOutcome, RouteQuery
from common.registry import MemoryRegistry
from common.service_record import ServiceRecord
from proto import router_pb2, router_pb2_grpc

QUERY = RouteQuery("r1", "m", (bytes(range(16)), bytes(16)), 40, 8, "salt", "user", 9.5, ("d9",), 1)
PLACEMENT = Placement("d0", "a", "p0", "b", "h:1", 32, 0.25, "dec-1")
OUTCOME = RequestOutcome("r1", "m", "dec-1", "d0", "p0", 40, 32, 8, 0.25, 0.5, 0.75, 4.0, 0.125, "stop", "", 2)


class Replica(router_pb2_grpc.RouterServicer):
    """A router that answers with its own name as the decode worker, refuses, or keeps silent."""

    def __init__(self, name: str) -> None:
        self.name, self.num_calls = name, 0
        self.refusal: Overloaded | None = None
        self.silent = False

    async def Route(  # noqa: N802
        self, request: router_pb2.RouteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> router_pb2.RouteResponse:
        self.num_calls += 1
        if self.silent:
            await asyncio.sleep(30)
        if self.refusal is not None:
            return router_pb2.RouteResponse(refusal=rpc.error_to_proto(self.refusal))
        return router_pb2.RouteResponse(placement=placement_to_proto(Placement(self.name)))


class Routers:
    async def __aenter__(self) -> Routers:
        self.registry, self.replicas, self.servers = MemoryRegistry(), [], []  # type: ignore[var-annotated]
        self.directory, self.bus = Directory(self.registry), MemoryBus()
        self.client = RouterClient(self.directory, self.bus, attempt_timeout_s=0.3)
        return self

    async def add(self, name: str) -> Replica:
        replica, server = Replica(name), rpc.new_server()
        router_pb2_grpc.add_RouterServicer_to_server(replica, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await self.registry.register(ServiceRecord("router", name, "a", f"127.0.0.1:{port}"), 60)
        await self.directory.refresh()
        self.replicas.append(replica)
        self.servers.append(server)
        return replica

    async def __aexit__(self, *_: object) -> None:
        await self.client.stop()
        for server in self.servers:
            await server.stop(0)


def test_query_placement_and_outcome_survive_the_wire() -> None:
    assert query_from(query_to_proto(QUERY)) == QUERY
    assert placement_from(placement_to_proto(PLACEMENT)) == PLACEMENT
    assert outcome_from(outcome_to_proto(OUTCOME)) == OUTCOME
    failed = RequestOutcome("r2", "m", error_code="worker_lost")
    assert outcome_from(outcome_to_proto(failed)) == failed


@pytest.mark.parametrize(("changes", "field"), [
    ({"block_hashes": b"x" * 17}, "block_hashes"), ({"request_id": ""}, "request_id"),
    ({"num_prompt_tokens": 0}, "num_prompt_tokens")])
def test_a_wrong_query_names_its_field(changes: dict[str, Any], field: str) -> None:
    request = query_to_proto(QUERY)
    for name, value in changes.items():
        setattr(request, name, value)
    with pytest.raises(InvalidRequest, match=field):
        query_from(request)


async def test_calls_spread_over_live_routers() -> None:
    async with Routers() as routers:
        one, two = await routers.add("r0"), await routers.add("r1")
        for _ in range(10):
            await routers.client.route(QUERY)
        assert (one.num_calls, two.num_calls) == (5, 5)


async def test_a_dead_router_is_replaced_within_the_call_and_avoided_afterwards() -> None:
    async with Routers() as routers:
        await routers.add("r0")
        alive = await routers.add("r1")
        await routers.servers[0].stop(0)
        for _ in range(6):
            assert (await routers.client.route(QUERY)).decode_worker_id == "r1"
        assert alive.num_calls == 6


async def test_a_router_that_hangs_costs_one_attempt_and_is_avoided_afterwards() -> None:
    async with Routers() as routers:
        hung, alive = await routers.add("r0"), await routers.add("r1")
        hung.silent = True
        for _ in range(6):
            assert (await routers.client.route(QUERY)).decode_worker_id == "r1"
        assert (hung.num_calls, alive.num_calls) == (1, 6)


async def test_a_router_that_failed_is_asked_again_when_no_other_is_left() -> None:
    async with Routers() as routers:
        only = await routers.add("r0")
        only.silent = True
        with pytest.raises(Unavailable, match="no router answered"):
            await routers.client.route(QUERY)
        only.silent = False
        assert (await routers.client.route(QUERY)).decode_worker_id == "r0"


async def test_a_refusal_is_the_answer_and_no_other_router_is_asked() -> None:
    async with Routers() as routers:
        replicas = [await routers.add("r0"), await routers.add("r1")]
        for replica in replicas:
            replica.refusal = Overloaded("full", retry_after_s=7.0)
        with pytest.raises(Overloaded, match="full") as refusal:
            await routers.client.route(QUERY)
        assert refusal.value.retry_after_s == 7.0
        assert sum(r.num_calls for r in replicas) == 1


async def test_without_a_router_the_call_is_unavailable_at_once() -> None:
    async with Routers() as routers:
        with pytest.raises(Unavailable, match="none is registered"):
            await routers.client.route(QUERY)


async def test_a_new_life_of_a_router_is_called_at_its_new_address() -> None:
    async with Routers() as routers:
        await routers.add("r0")
        await routers.client.route(QUERY)
        await routers.servers[0].stop(0)
        again = await routers.add("r0")
        routers.registry.records["router", "r0"] = ServiceRecord(
            "router", "r0", "b", routers.registry.records["router", "r0"].address)
        await routers.directory.refresh()
        assert (await routers.client.route(QUERY)).decode_worker_id == "r0"
        assert again.num_calls == 1


async def test_an_outcome_is_told_to_all_who_listen() -> None:
    async with Routers() as routers:
        heard: list[RequestOutcome] = []

        async def handler(_subject: str, payload: bytes) -> None:
            heard.append(outcome_from(router_pb2.RequestOutcome.FromString(payload)))

        await routers.bus.subscribe(OUTCOME_SUBJECT, handler)
        await routers.client.publish(OUTCOME)
        assert heard == [OUTCOME]


async def test_a_channel_that_closes_under_a_call_makes_it_unavailable_and_cancels_nobody() -> None:
    async with Routers() as routers:
        replica = await routers.add("r0")
        replica.silent = True
        routers.client = RouterClient(routers.directory, routers.bus, attempt_timeout_s=20)
        call = asyncio.create_task(routers.client.route(QUERY))
        while not replica.num_calls:
            await asyncio.sleep(0.01)
        await routers.client.stop()
        with pytest.raises(Unavailable, match="closed"):
            await call
