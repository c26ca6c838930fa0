"""Prometheus metrics of a process, in one registry, and the port they are scraped at.

Labels take values from closed sets only (model names that exist, error codes, roles): nothing a client chooses.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from http.server import ThreadingHTTPServer
from threading import Thread

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

from common.exposition import MetricsHandler
from common.host_port import host_port

TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_TIME_BUCKETS = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))  # 1 to 500,000, in steps of 1-2-5
TRANSFER_BUCKETS = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series of every counter and histogram


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    return Counter(name, text, labels)


def preset(metric: Counter, values: Iterable[str]) -> Counter:
    """Show the series of a one-label counter from the start: one that is born at 1 has no increase to see."""
    for value in values:
        metric.labels(value)
    return metric


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(name, text, labels)


def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets)


INFO = gauge("shoal_service_info", "1, with the service's kind and version", ["service", "version"])


class _HttpServer6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class MetricsServer:
    """Serves `/metrics` from a thread, as OpenMetrics where asked. `port` 0 takes a free one; `address` says which."""

    def __init__(self, host: str, port: int) -> None:
        server = _HttpServer6 if ":" in host else ThreadingHTTPServer
        self._server = server((host, port), MetricsHandler)
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.port = self._server.server_port
        self.address = host_port(host, self.port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
