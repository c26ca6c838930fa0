"""gRPC channels by address, opened once and closed together."""

from __future__ import annotations

from collections import OrderedDict

import grpc.aio

from common import rpc
from common.wire_security import PLAINTEXT, WireSecurity

MAX_CHANNELS = 256


class ChannelPool:
    """Every channel of a process comes from here, with the credentials it was given.

    A channel of an address that has not been used for long is dropped when there are too many.
    """

    def __init__(self, security: WireSecurity = PLAINTEXT) -> None:
        self._security = security
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    def open(self, address: str) -> grpc.aio.Channel:
        """One that is the caller's alone, and the caller's to close."""
        return rpc.open_channel(address, self._security)

    def get(self, address: str) -> grpc.aio.Channel:
        """The shared one of this address."""
        channel = self._channels.pop(address, None) or self.open(address)
        self._channels[address] = channel
        if len(self._channels) > MAX_CHANNELS:
            self._channels.popitem(last=False)  # closes when its last call has ended
        return channel

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
