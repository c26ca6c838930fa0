"""The peer of a gateway that streams: `python -m bench.gateway_area.raw_asgi NUM_BYTES`, and in its input the
body of one stream, which has so many bytes.

The least an ASGI application on the gateway's own HTTP server can do: any POST is answered with the events of that
body, each sent as it is. All streams take turns, one event each, as the tokens of an engine's steps come. It prints
its port and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.sse import HEADERS

_END = b"\n\n"


def events_of(body: bytes) -> list[bytes]:
    """Each with the empty line that ends it."""
    return [event + _END for event in body.split(_END)[:-1]]


def application(events: list[bytes]) -> ASGIApp:
    async def answer(_scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return answer


async def _serve(events: list[bytes]) -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # so Nagle's delay is off
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(listener.getsockname()[1], flush=True)
    await uvicorn.Server(uvicorn.Config(
        application(events), http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False)).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(_serve(events_of(sys.stdin.buffer.read(int(sys.argv[1])))))
