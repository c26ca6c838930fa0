from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common import trace
from common.errors import ConfigError
from common.tracing import start_tracing
from tests.otlp import OtlpReceiver, ReceivedSpan


@contextmanager
def tracing(limit_s: float = 5.0) -> Iterator[None]:
    started = start_tracing("gateway", "gateway-7", "0.1")
    assert started.is_on
    try:
        yield
    finally:
        started.stop(limit_s)


def received(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, **env: str) -> list[ReceivedSpan]:
    for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, **env}.items():
        monkeypatch.setenv(name, value)
    with tracing(), trace.root("POST", trace.SERVER) as root, trace.span("route"):
        root.put({"text": "x", "yes": True, "count": 3, "seconds": 0.5, "names": ["a", "b"]})
    return receiver.spans()


def test_without_an_endpoint_nothing_that_traces_is_loaded() -> None:
    """The client of Redis loads the SDK's metrics by itself where it finds them."""
    code = """
import sys
from common.service_host import run
from common.tracing import start_tracing
assert not start_tracing("gateway", "", "0", {}).is_on
assert not start_tracing("gateway", "", "0", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:1", "OTEL_SDK_DISABLED": "true"}).is_on
assert not start_tracing("gateway", "", "0", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:1", "OTEL_TRACES_EXPORTER": "none"}).is_on
found = [name for name in sys.modules if name.startswith(("opentelemetry.sdk.trace", "opentelemetry.exporter"))]
assert not found, found
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spans_reach_the_endpoint_with_what_the_standard_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        spans = received(receiver, monkeypatch, OTEL_RESOURCE_ATTRIBUTES="service.instance.id=mine,deployment=blue")
        child, root = spans
        assert (root.service, root.instance, root.kind) == ("gateway", "mine", 2)
        assert root.attributes == {"text": "x", "yes": True, "count": 3, "seconds": 0.5, "names": ["a", "b"]}
        assert (child.parent_id, child.trace_id) == (root.span_id, root.trace_id)
        named = received(receiver, monkeypatch, OTEL_SERVICE_NAME="edge")
        assert {span.service for span in named[2:]} == {"edge"}


def test_the_standard_sampler_variables_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    with OtlpReceiver() as receiver:
        assert received(receiver, monkeypatch, OTEL_TRACES_SAMPLER_ARG="0.0") == []
        with tracing(), trace.attached({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}), trace.root("POST"):
            pass
        assert [span.parent_id for span in receiver.spans()] == ["b" * 16], "the caller had chosen"


def test_an_endpoint_that_never_answers_neither_blocks_nor_floods_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    with OtlpReceiver(answers=False) as receiver, caplog.at_level(logging.WARNING):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        with tracing(limit_s=0.1):
            for _ in range(2000):
                with trace.root("POST"):
                    pass
        assert receiver.spans() == []
        for complaint in ("the endpoint is away", "the endpoint is still away"):
            logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").error(complaint)
    names = [record.name for record in caplog.records if record.name.startswith("opentelemetry")]
    assert names.count("opentelemetry.sdk._shared_internal") == 1, "the queue is full"
    assert names.count("opentelemetry.exporter.otlp.proto.grpc.exporter") == 1


@pytest.mark.parametrize(("name", "value"), [
    ("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")])
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        start_tracing("gateway", "", "0", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", name: value})


def test_a_batch_larger_than_the_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    with pytest.raises(ConfigError, match="OTEL_"):
        start_tracing("gateway", "", "0")
