"""How metrics are written for whoever asks: plain text, or OpenMetrics, which carries exemplars.

prometheus_client turns the colon of `vllm:...` into an underscore in OpenMetrics samples, but not in their metadata, so
no dashboard would find them (its issue 1177). A colon is allowed in a metric's name, so nothing need be escaped here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import Final

from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as open_metrics
from prometheus_client.registry import Collector

OPEN_METRICS: Final = "application/openmetrics-text"


def encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """What writes a registry for this Accept header, and the content type of that."""
    encode, content_type = choose_encoder(accept)
    if not content_type.startswith(OPEN_METRICS):
        return encode, content_type
    return partial(open_metrics, escaping=ALLOWUTF8, version="1.0.0"), (
        f"{OPEN_METRICS}; version=1.0.0; charset=utf-8")


class MetricsHandler(BaseHTTPRequestHandler):
    """`/metrics` of this process, and nothing else."""

    timeout = 10  # s without a byte from or to the client

    def do_GET(self) -> None:
        if self.path.split("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        encode, content_type = encoder(self.headers.get("Accept", ""))
        body = encode(REGISTRY)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
        """Scrapes are not worth a line."""
