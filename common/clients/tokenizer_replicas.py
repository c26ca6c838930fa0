"""Live tokenizer replicas: which to take, one channel and one text link each.

A `Replica`'s life: made at its first pick → used ⇄ failed (not picked for a while, unless nothing else is there) →
retired (its record is gone from the directory: the channel closes once its calls have ended).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Final

import grpc.aio

from common.clients.channels import ChannelPool
from common.clients.text_link import TextLink
from common.directory import Directory
from common.errors import ModelNotFound, Unavailable
from common.service_record import ServiceRecord
from proto import tokenizer_pb2_grpc

SERVICE: Final = "tokenizer"
FAILED_S: Final = 1.0  # a replica that failed is avoided for this long
RETRY_WAIT_S: Final = 0.1  # between tries of a replica that failed, when it is the only one
CLOSE_GRACE_S: Final = 20.0


class Replica:
    """One process life of a tokenizer."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.failed_at = float("-inf")
        self._channel = channel
        self.stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._link: TextLink | None = None

    def link(self) -> TextLink:
        """The long text stream; opened again when the last one broke."""
        if self._link is None or self._link.broken:
            self._link = TextLink(self.stub)
        return self._link

    async def close(self, grace_s: float | None) -> None:
        if self._link is not None and grace_s is None:
            self._link.close()
        await self._channel.close(grace_s)
        if self._link is not None:
            self._link.close()


class TokenizerReplicas:
    """Picks round robin among the replicas of a model that the directory lists."""

    def __init__(self, directory: Directory, channels: ChannelPool | None = None) -> None:
        self._directory, self._channels = directory, channels or ChannelPool()
        self._replicas: dict[tuple[str, str], Replica] = {}  # (service_id, incarnation); bounded by the directory
        self._retiring: set[asyncio.Task[None]] = set()
        self._turn = 0
        self._stopped = False

    def has_other(self, model: str, full: Collection[str]) -> bool:
        """Whether a replica of the model that has not failed lately is not among the addresses `full`."""
        now = time.monotonic()
        replicas = map(self._replica, self._directory.records(SERVICE, model))
        return any(now - r.failed_at >= FAILED_S and r.address not in full for r in replicas)

    async def pick(self, model: str, deadline: float, full: Collection[str] = ()) -> Replica:
        """The next replica of the model; waits for one until `deadline` (monotonic). `full`: addresses to go past
        while another one lives.

        Raises `ModelNotFound` when there are replicas and none ever had the model, `Unavailable` at the deadline.
        """
        while not self._stopped:
            self._retire_gone()
            replica = self._next(model, full)
            if replica is not None and time.monotonic() - replica.failed_at >= RETRY_WAIT_S:
                return replica
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable(f"no tokenizer of model {model!r} can be reached", retry_after_s=1.0)
            await self._directory.changed(min(left, RETRY_WAIT_S))
        raise Unavailable("the tokenizer client is stopped")

    def mark_failed(self, replica: Replica) -> None:
        replica.failed_at = time.monotonic()

    async def stop(self) -> None:
        self._stopped = True
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*self._retiring, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.close(None)
        self._replicas.clear()

    def _next(self, model: str, full: Collection[str]) -> Replica | None:
        records = self._directory.records(SERVICE, model)
        if not records:
            if self._directory.all(SERVICE) and not self._directory.has_listed(SERVICE, model):
                raise ModelNotFound(f"the model {model!r} does not exist", param="model")
            return None
        replicas = [self._replica(record) for record in records]
        now = time.monotonic()
        healthy = [r for r in replicas if now - r.failed_at >= FAILED_S]
        self._turn += 1
        if healthy:
            with_room = [r for r in healthy if r.address not in full] or healthy
            return with_room[self._turn % len(with_room)]
        return min(replicas, key=lambda r: r.failed_at)

    def _replica(self, record: ServiceRecord) -> Replica:
        key = (record.service_id, record.incarnation)
        if key not in self._replicas:
            self._replicas[key] = Replica(record.address, self._channels.open(record.address))
        return self._replicas[key]

    def _retire_gone(self) -> None:
        if len(self._replicas) == 0:
            return
        listed = {(record.service_id, record.incarnation) for record in self._directory.all(SERVICE)}
        for key in self._replicas.keys() - listed:
            task = asyncio.create_task(self._replicas.pop(key).close(CLOSE_GRACE_S))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
