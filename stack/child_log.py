"""What one child writes: to its file, to the console, and its last lines kept for an error message.

The file is bounded: at `_FILE_BYTES` it becomes `NAME.log.1`, replacing the one before.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from pathlib import Path

from stack.console import Console, read_line

_FILE_BYTES = 32 << 20
_LINE_BYTES = 64 << 10  # a longer line is cut into several
_TAIL_LINES = 15


class ChildLog:
    """Appends to `folder/NAME.log` across the child's lives."""

    def __init__(self, name: str, folder: Path, console: Console) -> None:
        self._name, self._console = name, console
        self.path = folder / f"{name}.log"
        self._file = self.path.open("ab")
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._pump: asyncio.Task[None] | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def open(self) -> int:
        """A pipe's write end for a new life of the child; the caller closes its copy after the spawn.

        Not asyncio's own `stdout=PIPE`: with it `Process.wait` also waits for whatever else holds the pipe.
        """
        self._tail.clear()
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0))
        self._pump = asyncio.create_task(self._read(reader))
        return write_end

    async def finish(self, timeout_s: float) -> None:
        """Read what the life that has ended wrote."""
        if self._pump is not None and self._transport is not None:
            await asyncio.wait({self._pump}, timeout=timeout_s)
            self._pump.cancel()
            self._transport.close()

    def tail(self) -> str:
        return "\n".join(f"  {line}" for line in self._tail)

    def close(self) -> None:
        self._file.close()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take(line)
            self._file.flush()
        if rest:
            self._take(rest)
            self._file.flush()

    def _take(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        if self._file.tell() > _FILE_BYTES:
            self._file.close()
            self.path.replace(self.path.with_suffix(".log.1"))
            self._file = self.path.open("ab")
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            self._tail.append(read_line(text)[1])
            self._console.child_line(self._name, text)
