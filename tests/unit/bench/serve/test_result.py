from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.figures import write
from bench.serve.lag import ClientLag, LoopDelay, client_lag
from bench.serve.options import DatasetOptions, ServeOptions
from bench.serve.record import Outcome, RequestRecord
from bench.serve.report import figures, print_tables
from bench.serve.result import result
from bench.serve.summary import summarize

OPTIONS = ServeOptions("http://h", "m", DatasetOptions(seed=3), percentiles=(50.0, 99.9), goodput={"ttft": 500.0})
LAG = ClientLag(1.0, 2.0, 3.0, 4.0, 10.0)
RECORDS = [
    RequestRecord(0, 4, 2, outcome=Outcome.COMPLETED, chunk_s=[0.1, 0.3], end_s=0.3, text="ab"),
    RequestRecord(1, 4, 2, outcome=Outcome.REFUSED, status=503, end_s=0.1, error="503: full"),
]
SUMMARY = summarize(RECORDS, 2.0, OPTIONS.percentiles, OPTIONS.goodput)

VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests"}
DETAIL_KEYS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "server_queue_times",
    "server_ttfts", "generated_texts", "errors"}


def test_the_keys_are_those_of_vllm() -> None:
    body = result(OPTIONS, RECORDS, SUMMARY, {}, LAG, "", detailed=False)
    latencies = [f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")
                 for kind in ("mean", "median", "std", "p50", "p99.9")]
    assert {*VLLM_KEYS, *latencies} <= body.keys()
    assert not body.keys() & DETAIL_KEYS
    assert (body["completed"], body["failed"], body["num_prompts"]) == (1, 1, 2)
    assert body["outcomes"]["refused"] == 1
    assert body["refused_by_status"] == {"503": 1}
    assert (body["request_rate"], body["request_goodput"]) == ("inf", 0.5)
    json.dumps(body, allow_nan=False)


def test_details_have_one_entry_a_request() -> None:
    body = result(OPTIONS, RECORDS, SUMMARY, {"g": SUMMARY}, LAG, "", detailed=True)
    assert all(len(body[key]) == 2 for key in DETAIL_KEYS)
    assert (body["ttfts"], body["errors"], body["generated_texts"]) == ([0.1, 0.0], ["", "503: full"], ["ab", ""])
    assert body["groups"]["g"]["completed"] == 1


def test_figures_are_in_the_format_of_all_areas(tmp_path: Path) -> None:
    made = figures(SUMMARY, {}, LAG)
    write(made, tmp_path / "figures.json")
    body = json.loads((tmp_path / "figures.json").read_text())
    by_name = {figure["name"]: figure for figure in body["figures"]}
    assert by_name["TTFT mean"]["value"] == 100.0
    assert by_name["goodput"]["ratio"] == 1.0
    assert by_name["client sent late, p99"]["ok"] is True
    assert "env" in body


def test_waiting_for_a_slot_is_shown_where_there_was_any_and_warned_about_where_it_thins_out_a_rate() -> None:
    assert not [name for name in result(OPTIONS, RECORDS, SUMMARY, {}, LAG, "", detailed=False) if "_queue_ms" in name]
    waited = [replace(record, queue_s=queue_s) for record, queue_s in zip(RECORDS, (0.0, 0.2), strict=True)]
    summary = summarize(waited, 2.0, OPTIONS.percentiles, {})
    body = result(OPTIONS, waited, summary, {}, LAG, "", detailed=True)
    assert (body["mean_queue_ms"], body["p50_queue_ms"], body["num_resent"]) == (100.0, 100.0, 0)
    assert {f.name: f.value for f in figures(summary, {}, LAG)}["wait for a slot mean"] == 100.0
    shown = Console(width=120, record=True, file=io.StringIO())
    print_tables(shown, "t", replace(summary, num_resent=3), {}, LAG)
    text = shown.export_text()
    assert "mean 100.0, p50 100.0" in text
    assert "3, as the server had closed" in text
    warning = client_lag(waited, LoopDelay(), 10.0, has_rate=True).warning
    assert "requests waited 198.0 ms (p99) for --max-concurrency" in warning
    assert client_lag(waited, LoopDelay(), 10.0).warning == "", "a closed loop always waits"


@pytest.mark.parametrize(("options", "has_rate"), [
    ({}, False), ({"request_rate": 4.0}, True), ({"dataset": DatasetOptions("interference")}, True)])
def test_a_rate_is_one_that_is_asked_for_or_the_workloads_own(options: dict[str, Any], has_rate: bool) -> None:
    assert ServeOptions("http://h", "m", **options).has_rate is has_rate


def test_a_client_beyond_its_limit_is_marked_and_warned_about() -> None:
    late = ClientLag(25.0, 30.0, 3.0, 4.0, 10.0)
    assert "load generator itself was late" in late.warning
    assert "25.0 ms" in late.warning
    assert "event loop" not in late.warning
    assert next(f for f in figures(SUMMARY, {}, late) if "sent late" in f.name).ok is False
    assert LAG.warning == ""
