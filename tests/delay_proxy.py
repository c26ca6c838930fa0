"""A TCP proxy in the test's own loop that holds answers back for a while."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from types import TracebackType
from typing import Self


class DelayProxy:
    """`async with DelayProxy(port, 0.1) as proxy: connect to proxy.port`. `delay_s` may change at any time."""

    def __init__(self, target_port: int, delay_s: float, tls: ssl.SSLContext | None = None) -> None:
        """With `tls` clients speak TLS to it, and it speaks plaintext to the target."""
        self.delay_s, self._target_port, self._tls = delay_s, target_port, tls
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # lets the closed transports go

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        for source, sink, delayed in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, delayed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, delayed: bool) -> None:
        with contextlib.suppress(OSError), contextlib.closing(sink):
            while raw := await source.read(1 << 16):
                if delayed:
                    await asyncio.sleep(self.delay_s)
                sink.write(raw)
                await sink.drain()
