"""Prometheus metrics of a process, in one registry, and the port they are scraped at.

Labels take values from closed sets only (model names that exist, error codes, roles): nothing a client chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, start_http_server

TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    return Counter(name, text, labels)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(name, text, labels)


def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets)


class MetricsServer:
    """Serves `/metrics` from a thread. `port` 0 takes a free one; `address` says which."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, REGISTRY)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
