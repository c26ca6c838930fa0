"""The sender's side of the transport that goes wherever gRPC goes: blocks as messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from common import rpc
from common.clients.channels import ChannelPool
from common.errors import ShoalError
from common.hand_off import PrefillOrder
from proto import prefill_pb2, prefill_pb2_grpc

CHUNK_BYTES = 1 << 20
PUSH_TIMEOUT_S = 30.0


class GrpcPusher:
    """One `Push` call per run of blocks; it returns once the receiver has all bytes."""

    def __init__(self, order: PrefillOrder, channels: ChannelPool) -> None:
        self._order = order
        self._stub = prefill_pb2_grpc.KvTransferStub(channels.get(order.ticket.address))

    async def push(self, first_block: int, views: Sequence[memoryview]) -> None:
        try:
            ack = await self._stub.Push(self._chunks(first_block, views), timeout=PUSH_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        if ack.HasField("error"):
            error_: ShoalError = rpc.error_from_proto(ack.error)
            raise error_

    async def close(self) -> None:
        """Channels are shared; nothing is held per transfer."""

    async def _chunks(self, first_block: int, views: Sequence[memoryview]) -> AsyncIterator[prefill_pb2.KvChunk]:
        for index, view in enumerate(views):
            for offset in range(0, len(view), CHUNK_BYTES):
                yield prefill_pb2.KvChunk(
                    transfer_id=self._order.transfer_id, epoch=self._order.epoch, first_block=first_block + index,
                    num_blocks=1, offset=offset, payload=bytes(view[offset : offset + CHUNK_BYTES]))
