"""The router as its callers see it: `common.placement.RouterPort` over gRPC, outcomes over the bus.

A call's life: the next live router → answered (a placement, or its refusal); one that is unreachable or does not
answer within `ATTEMPT_TIMEOUT_S` is avoided for a while and another is asked at once; `Unavailable` when none is left.
A router's channel: made at its first call → closed when the directory no longer lists that incarnation.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import grpc.aio

from common import rpc
from common.bus import Bus
from common.cancellation import uncancelled
from common.clients.channels import ChannelPool
from common.clients.router_wire import OUTCOME_SUBJECT, outcome_to_proto, placement_from, query_to_proto
from common.directory import Directory
from common.errors import DeadlineExceeded, Unavailable
from common.placement import Placement, RequestOutcome, RouteQuery
from common.service_record import ServiceRecord
from proto import router_pb2_grpc

SERVICE: Final = "router"
ATTEMPT_TIMEOUT_S: Final = 0.5
AVOID_S: Final = 2.0  # a router that failed is asked again after this long, or when no other is left


class RouterClient:
    """Ready when made; `stop` once. The directory and the bus belong to the caller."""

    def __init__(
        self, directory: Directory, bus: Bus, channels: ChannelPool | None = None, *,
        attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
    ) -> None:
        self._channels = channels or ChannelPool()
        self._directory, self._bus = directory, bus
        self._attempt_timeout_s = attempt_timeout_s
        self._replicas: dict[tuple[str, str], _Replica] = {}  # (service_id, incarnation); bounded by the directory
        self._closing: set[asyncio.Task[None]] = set()
        self._turn = 0

    async def route(self, query: RouteQuery) -> Placement:
        """Raises `Unavailable` when no router answers, else what the router refuses with (`Overloaded`, …)."""
        request = query_to_proto(query)
        failure = "none is registered"
        for replica in self._in_order():
            try:
                answer = await uncancelled(replica.stub.Route(request, timeout=self._attempt_timeout_s), "router")
            except (Unavailable, DeadlineExceeded, grpc.aio.UsageError) as error:  # the last: closed meanwhile
                replica.failed_at = time.monotonic()
                failure = str(error)
                continue
            if answer.HasField("refusal"):
                raise rpc.error_from_proto(answer.refusal)
            return placement_from(answer.placement)
        raise Unavailable(f"no router answered: {failure}", retry_after_s=1.0)

    async def publish(self, outcome: RequestOutcome) -> None:
        await self._bus.publish(OUTCOME_SUBJECT, outcome_to_proto(outcome).SerializeToString())

    async def stop(self) -> None:
        replicas, self._replicas = list(self._replicas.values()), {}
        for replica in replicas:
            await replica.channel.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _in_order(self) -> list[_Replica]:
        """All live routers, the next one in turn first, those that failed of late last."""
        records = self._directory.records(SERVICE)
        self._close_gone()
        replicas = [self._replica(record) for record in records]
        self._turn += 1
        start = self._turn % max(1, len(replicas))
        now = time.monotonic()
        return sorted(replicas[start:] + replicas[:start], key=lambda r: now - r.failed_at < AVOID_S)

    def _replica(self, record: ServiceRecord) -> _Replica:
        key = (record.service_id, record.incarnation)
        if key not in self._replicas:
            self._replicas[key] = _Replica(self._channels.open(record.address))
        return self._replicas[key]

    def _close_gone(self) -> None:
        listed = {(record.service_id, record.incarnation) for record in self._directory.all(SERVICE)}
        for key in self._replicas.keys() - listed:
            task = asyncio.create_task(self._replicas.pop(key).channel.close(self._attempt_timeout_s))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Replica:
    """One process life of a router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.failed_at = float("-inf")
        self.channel = channel
        self.stub = router_pb2_grpc.RouterStub(self.channel)
