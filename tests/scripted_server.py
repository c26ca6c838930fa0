"""A real HTTP server whose answers a test writes: each request is answered by `answer(number, body, writer)`."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Json = dict[str, Any]
Answer = Callable[[int, Json, "Reply"], Awaitable[None]]


class Reply:
    """What an answer is written with."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def whole(self, status: int, body: str, headers: str = "") -> None:
        self.writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{headers}\r\n{body}".encode())
        await self.writer.drain()

    async def open(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def send(self, text: str) -> None:
        raw = text.encode()
        self.writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        await self.writer.drain()

    async def event(self, **fields: Any) -> None:
        await self.send(f"data: {json.dumps(fields)}\n\n")

    async def text(self, text: str, finish: str | None = None) -> None:
        await self.event(choices=[{"index": 0, "text": text, "finish_reason": finish}])

    async def end(self, tokens: int, prompt: int = 5, cached: int = 0, done: bool = True) -> None:
        await self.event(choices=[], usage={
            "prompt_tokens": prompt, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}})
        if done:
            await self.send("data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()


class ScriptedServer:
    """`bodies` are those that came, in order."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: list[Json] = []
        self.headers: list[str] = []
        self.url = ""
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split()[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.headers.append(head)
                await self._answer(len(self.bodies) - 1, self.bodies[-1], Reply(writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


@asynccontextmanager
async def scripted(answer: Answer, context: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedServer]:
    made = ScriptedServer(answer)
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        await made.serve(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    made.url = f"{'https' if context else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
