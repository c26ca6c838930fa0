"""Prometheus metrics of a process, in one registry, and the port they are scraped at.

Labels take values from closed sets only (model names that exist, error codes, roles): nothing a client chooses.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, disable_created_metrics, start_http_server

TTFT_BUCKETS = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
ITL_BUCKETS = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_TIME_BUCKETS = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKEN_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))  # 1 to 500,000, in steps of 1-2-5
TRANSFER_BUCKETS = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30)

disable_created_metrics()  # they would double the series of every counter and histogram


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    return Counter(name, text, labels)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(name, text, labels)


def histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets)


INFO = gauge("shoal_service_info", "1, with the service's kind and version", ["service", "version"])


class MetricsServer:
    """Serves `/metrics` from a thread, as OpenMetrics where asked. `port` 0 takes a free one; `address` says which."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._thread = start_http_server(port, host, REGISTRY)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
