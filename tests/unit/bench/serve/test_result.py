from __future__ import annotations

import json
from pathlib import Path

from bench.figures import write
from bench.serve.lag import ClientLag
from bench.serve.options import DatasetOptions, ServeOptions
from bench.serve.record import Outcome, RequestRecord
from bench.serve.report import figures
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


def test_a_client_beyond_its_limit_is_marked_and_warned_about() -> None:
    late = ClientLag(25.0, 30.0, 3.0, 4.0, 10.0)
    assert "load generator itself was late" in late.warning
    assert "25.0 ms" in late.warning
    assert "event loop" not in late.warning
    assert next(f for f in figures(SUMMARY, {}, late) if "sent late" in f.name).ok is False
    assert LAG.warning == ""
