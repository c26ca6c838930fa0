"""A server that streams as fast as it is read, to measure clients: `python -m bench.serve.raw_server CHUNKS`.

Any POST is answered with CHUNKS server-sent events, each a write of its own as from a server that streams token by
token; all streams get their next chunk in turn. It prints its port and ends when its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Final, cast

import uvloop

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_HIGH_WATER: Final = 1 << 20


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _event(**changes: object) -> bytes:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
    body = {"id": "cmpl-" + "0" * 32, "object": "text_completion", "created": 1_700_000_000, "model": "raw-server",
            "system_fingerprint": "fp_0123456789", "choices": [choice], "usage": None, **changes}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


class RawServer(asyncio.Protocol):
    """One connection: counts the body, then is one of the open streams until its chunks are out."""

    def __init__(self, num_chunks: int, streams: dict[RawServer, int]) -> None:
        self._num_chunks, self._streams = num_chunks, streams
        self._received = b""
        usage = {"prompt_tokens": 8, "completion_tokens": num_chunks, "total_tokens": 8 + num_chunks}
        self._chunk = _framed(_event())
        self._end = _framed(_event(choices=[], usage=usage)) + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, gap, body = self._received.partition(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n")
                       if line.startswith(b"content-length:")), 0)
        if gap and len(body) >= length:
            self._received = b""
            self._transport.write(_HEAD)
            self._streams[self] = self._num_chunks

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.pop(self, None)

    def step(self) -> None:
        if self._transport.get_write_buffer_size() > _HIGH_WATER:
            return
        self._streams[self] -= 1
        self._transport.write(self._chunk)
        if not self._streams[self]:
            del self._streams[self]
            self._transport.write(self._end)


async def _serve(num_chunks: int) -> None:
    loop = asyncio.get_running_loop()
    streams: dict[RawServer, int] = {}
    server = await loop.create_server(lambda: RawServer(num_chunks, streams), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    asked_to_end = loop.run_in_executor(None, sys.stdin.read)
    while not asked_to_end.done():
        for stream in list(streams):
            stream.step()
        await asyncio.sleep(0 if streams else 0.001)


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
