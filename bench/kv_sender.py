"""The prefill side of a measured hand-off, in this process: the real desk, sender and pushers behind real gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.bulk_engine import BLOCK_SIZE, FINGERPRINT, BulkEngine
from common import rpc
from common.blocks.mapped_segments import MappedSegments
from common.blocks.shm_pusher import ShmPusher
from common.clients.channels import ChannelPool
from common.clients.kv_push import GrpcPusher
from common.hand_off import SHM, PrefillOrder, Pusher
from engine.kv_transfer.sender import Sender
from engine.outputs import RequestOutput
from prefill_svc.desk import PrefillDesk
from prefill_svc.service import PrefillServicer
from proto import prefill_pb2_grpc


class KvSender(BulkEngine):
    """`start`, then hand-offs from `address`, then `stop`."""

    def __init__(self, num_blocks: int, shm_dir: Path) -> None:
        super().__init__(num_blocks, seed=1, caches=True)
        self._shm_dir, self._channels, self._mapped = shm_dir, ChannelPool(), MappedSegments()
        self._sender = Sender(self.engine, None, self._open_pusher, BLOCK_SIZE)
        self._server = rpc.new_server()
        self.address = ""

    async def start(self) -> None:
        self.engine.start()
        desk = PrefillDesk(self._sender, FINGERPRINT, "", max_transfers=1, grant_lease_s=5.0)
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(desk), self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(grace=0.5)
        await self.engine.stop()
        await self._channels.close()
        self._mapped.close()

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        self._sender.on_outputs(outputs)

    def _open_pusher(self, order: PrefillOrder) -> Pusher:
        if order.ticket.transport == SHM:
            return ShmPusher(order.ticket, self._shm_dir, self._mapped)
        return GrpcPusher(order, self._channels)
