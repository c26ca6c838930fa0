"""Real NATS and Valkey on free ports, one process each, that a test may kill and start again."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from pathlib import Path

from stack.child import ChildSpec
from stack.ports import free_port
from stack.servers import nats_spec, valkey_spec


class RealServer:
    """A server of the wheels. `kill` is SIGKILL; `start` again keeps the port and the folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.port = free_port("127.0.0.1")
        spec: ChildSpec = {"nats": nats_spec, "valkey": valkey_spec}[name](self.port, folder)
        self.url = {"nats": f"nats://127.0.0.1:{self.port}", "valkey": f"redis://127.0.0.1:{self.port}/0"}[name]
        self._argv = spec.argv
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RealServer:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                time.sleep(0.05)
        raise TimeoutError(f"no server at {self.url} after 20 s")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None
