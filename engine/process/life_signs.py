"""Tells the worker that its engine's process lives, while a model loads.

States: new → telling (`start`), every `EVERY_S` from a thread of its own → stopped (`stop`): nothing more is sent.
"""

from __future__ import annotations

import os
import socket
import threading

from engine.process import messages

EVERY_S = 0.5


class LifeSigns:
    """Until `stop` nobody else may send to the worker. A worker that does not take them ends this process."""

    def __init__(self, worker: socket.socket) -> None:
        self._worker = worker
        self._read = (0, 0)  # bytes read, bytes in all
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="life-signs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def progress(self, num_bytes: int, num_bytes_total: int) -> None:
        """Goes along with the next sign."""
        self._read = (num_bytes, num_bytes_total)

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped.wait(EVERY_S):
            try:
                self._worker.sendall(messages.frame(messages.Loading(*self._read)))
            except OSError:
                os._exit(1)
