"""What a scrape gets, over HTTP and in both formats."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from common.exposition import encoder
from common.metrics import MetricsServer

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
PROMETHEUS_3 = ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
                "text/plain;version=0.0.4;q=0.3,*/*;q=0.1")


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "application/openmetrics-text", "text/plain", ""])
def test_a_colon_in_a_name_stays_in_samples_and_metadata(accept: str) -> None:
    registry = CollectorRegistry()
    Counter("vllm:prompt_tokens", "text", registry=registry).inc()
    encode, content_type = encoder(accept)
    text = encode(registry).decode()
    assert "\nvllm:prompt_tokens_total 1.0" in text
    assert "TYPE vllm:prompt_tokens" in text
    assert "vllm_" not in text
    assert "_created" not in text
    assert content_type.startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain")


def test_the_server_answers_metrics_alone_and_frees_its_port() -> None:
    server = MetricsServer("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=5) as answer:
        assert b"shoal_" in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{server.address}/etc", timeout=5)
    server.close()
    MetricsServer("127.0.0.1", server.port).close()
