"""Everything that the dashboards and rules ask for is there, in a real Prometheus that scrapes a real stack."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
import yaml

from common.gpu_metrics import GpuMetrics
from deploy.grafana.dashboards import DASHBOARDS, FOLDER
from stack.scrape import samples
from tests import prometheus
from tests.factories import tiny_llama
from tests.otlp import OtlpReceiver
from tests.prometheus import RunningPrometheus
from tests.promql import faults, names
from tests.stack import RunningStack

pytestmark = pytest.mark.skipif(not prometheus.is_installed(), reason=prometheus.MISSING)

RULES = FOLDER.parents[1] / "prometheus" / "rules.yml"
JOBS = ("gateway", "tokenizer", "router", "prefill", "decode", "kvstore")
ENV = {"SHOAL_ROUTER_LOCAL_PREFILL_TOKENS": "16", "SHOAL_ROUTER_HANDOFF_PATIENCE": "1000"}
# Filters that keep a panel free of zeros: nothing to see is the normal state.
QUIET = {"Refusals of workers", "Refusals and broken streams"}
# What vLLM's dashboards, the endpoint picker and KEDA ask a worker for.
VLLM = (
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "external_prefix_cache_queries_total", "external_prefix_cache_hits_total", "prompt_tokens_total",
    "prompt_tokens_cached_total", "prompt_tokens_by_source_total", "generation_tokens_total",
    "num_preemptions_total", "request_success_total", "admission_rejections_total",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "request_inference_time_seconds_bucket", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_params_n_bucket", "request_params_max_tokens_bucket",
    "request_prefill_kv_computed_tokens_bucket",
)


@dataclass
class Seen:
    stack: RunningStack
    server: RunningPrometheus
    labels: dict[str, set[str]]  # of every metric, by name
    traces: OtlpReceiver


@pytest.fixture(scope="module")
def seen(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("dashboards")
    model = tiny_llama(folder / "tiny", tokenizer_from=smollm2)
    with OtlpReceiver() as traces, RunningStack(
            folder, runner="torch", model=model, prefill=1, decode=1, mixed=0, env={**ENV, **traces.env}) as stack:
        targets = {job: [stack.service(f"{job}-0").metrics_address] for job in JOBS}
        with RunningPrometheus(folder / "prometheus", targets, RULES) as server:
            use(stack)
            server.wait_for_new_scrapes()
            server.wait_for(*(f"shoal:slo_bad:ratio_rate{window}" for window in ("5m", "30m", "1h", "6h")))
            yield Seen(stack, server, server.labels_by_metric(), traces)


def use(stack: RunningStack) -> None:
    """Requests of all kinds: streamed and whole, handed off, cached, refused, wrong."""
    long = "One two three four five six seven eight nine ten eleven twelve thirteen. " * 6
    with httpx2.Client(base_url=stack.url, timeout=60) as client:
        for i in range(4):
            body = {"model": stack.model, "prompt": f"{i // 2} {long}", "max_tokens": 8, "ignore_eos": True}
            answer = client.post("/v1/completions", json={**body, "stream": i % 2 == 0})
            assert answer.status_code == 200, answer.text
            assert "error" not in answer.text, answer.text
        chat = {"model": stack.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
        assert "[DONE]" in client.post("/v1/chat/completions", json=chat).text
        assert client.post("/v1/completions", json={**body, "prompt": [10**6]}).status_code == 400
        assert client.post("/v1/completions", json={**body, "model": "no such"}).status_code == 404
        assert client.get("/nowhere").status_code == 404


def plain(expr: str) -> str:
    """With the dashboard's variables replaced as by All."""
    for variable in ("$job", "$instance", "$model_name"):
        expr = expr.replace(variable, ".*")
    return expr.replace("$__rate_interval", "1m")


def panel_expressions() -> list[tuple[str, str]]:
    return [(f"{board.uid}: {panel.title}", query.expr)
            for board in DASHBOARDS for panel in board.panels() for query in panel.queries]


def all_expressions() -> list[tuple[str, str]]:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    found = panel_expressions() + [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules]
    return [(where, plain(expr)) for where, expr in found]


def test_every_expression_parses(tmp_path: Path) -> None:
    file = tmp_path / "all.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": [
        {"record": f"e{i}", "expr": expr} for i, (_, expr) in enumerate(all_expressions())]}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_that_is_asked_for_exists_and_has_the_labels(seen: Seen) -> None:
    with_gpu = seen.labels | {name: {"gpu", "job", "instance"} for name in GpuMetrics.names()}
    found = {(where, expr): faults(expr, with_gpu) for where, expr in all_expressions()}
    assert {where: fault for where, fault in found.items() if fault} == {}


def test_every_panel_shows_something(seen: Seen) -> None:
    empty = [(where, expr) for where, expr in panel_expressions()
             if not names(expr).metrics & GpuMetrics.names() and not seen.server.query(plain(expr))]
    assert [where for where, _ in empty if where.split(": ", 1)[1] not in QUIET] == [], empty


def test_a_stack_that_is_well_raises_no_alert_of_a_fault(seen: Seen) -> None:
    assert [alert["labels"]["alertname"] for alert in seen.server.get("alerts")["alerts"]
            if alert["state"] == "firing"] == []
    assert [rule["name"] for group in seen.server.get("rules")["groups"] for rule in group["rules"]
            if rule["health"] != "ok"] == []


def test_a_decode_worker_speaks_vllms_names(seen: Seen) -> None:
    assert [name for name in VLLM if f"vllm:{name}" not in seen.labels] == []
    assert all({"model_name", "engine"} <= labels for name, labels in seen.labels.items() if name.startswith("vllm:"))


def test_the_tokens_by_source_sum_to_the_prompts_and_name_the_hand_off(seen: Seen) -> None:
    found = {s.labels["source"]: s.value for s in samples(seen.stack.service("decode-0").metrics_address)
             if s.name == "shoal_prompt_tokens_by_source_total"}
    decode = seen.stack.metrics("decode-0")
    assert sum(found.values()) == decode["shoal_worker_request_prompt_tokens_sum"] > 0
    assert found["remote"] > 0, "the prompts were to be handed off"
    assert found["device"] > 0, "the second of two equal prompts was to be a hit"
    assert decode["shoal_kv_leaked_blocks"] == 0


def test_goodput_counts_what_was_ours_to_serve(seen: Seen) -> None:
    gateway = seen.stack.metrics("gateway-0")
    assert gateway["shoal_gateway_slo_requests_total"] == 5, "neither the wrong token nor the unknown model count"
    assert gateway["shoal_gateway_slo_good_total"] <= 5


@pytest.mark.parametrize("metric", ["shoal_gateway_ttft_seconds", "shoal_worker_ttft_seconds"])
def test_a_time_to_first_token_links_to_its_trace(seen: Seen, metric: str) -> None:
    now = time.time()
    found = seen.server.get("query_exemplars", query=f"{metric}_bucket", start=str(now - 600), end=str(now + 60))
    linked = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
    assert linked
    deadline = time.monotonic() + 20  # spans are sent in batches
    while linked - set(seen.traces.traces()):
        assert time.monotonic() < deadline, f"{linked} are not among {set(seen.traces.traces())}"
        time.sleep(0.1)


def test_what_clients_choose_makes_no_series_anywhere(seen: Seen) -> None:
    before = num_series(seen.stack)
    with httpx2.Client(base_url=seen.stack.url, timeout=60) as client:
        for i in range(100):
            client.post("/v1/completions", json={"model": f"m{i}", "prompt": "a"})
            client.get(f"/path{i}", headers={"x-request-id": f"r{i}", "traceparent": f"00-{i:032x}-{i:016x}-01"})
        for i in range(10):
            client.post("/v1/completions", headers={"x-request-id": f"q{i}"}, json={
                "model": seen.stack.model, "prompt": f"secret{i}", "user": f"u{i}", f"field{i}": i, "max_tokens": 1})
    assert num_series(seen.stack) - before <= 20
    text = " ".join(repr(sample.labels) for job in JOBS for sample in samples(
        seen.stack.service(f"{job}-0").metrics_address))
    assert not any(word in text for word in ("secret1", "'u1'", "m17", "path17", "field1"))


def num_series(stack: RunningStack) -> int:
    return sum(len(samples(stack.service(f"{job}-0").metrics_address)) for job in JOBS)
