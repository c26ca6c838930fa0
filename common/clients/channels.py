"""gRPC channels by address, opened once and closed together."""

from __future__ import annotations

from collections import OrderedDict

import grpc.aio

from common import rpc

MAX_CHANNELS = 256


class ChannelPool:
    """A channel of an address that has not been used for long is dropped when there are too many."""

    def __init__(self) -> None:
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def get(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.pop(address, None) or rpc.open_channel(address)
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            self._channels.popitem(last=False)  # closes when its last call has ended
        return channel

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
