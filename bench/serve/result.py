"""The result as `vllm bench serve` writes it, key for key, with ours beside it.

`failed` counts all that did not complete, as there; `outcomes` tells them apart. A value that does not exist is null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bench.serve.lag import ClientLag
from bench.serve.options import ServeOptions
from bench.serve.record import Outcome, RequestRecord
from bench.serve.summary import METRICS, Spread, Summary

Json = dict[str, Any]


def result(
    options: ServeOptions, records: Sequence[RequestRecord], summary: Summary, groups: dict[str, Summary],
    lag: ClientLag, stopped_by: str, *, detailed: bool,
) -> Json:
    """`detailed` adds the lists with one entry a request, in the order of the workload."""
    body = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), "endpoint_type": options.endpoint_type,
        "backend": options.endpoint_type, "label": options.label or options.endpoint_type,
        "model_id": options.model, "tokenizer_id": options.tokenizer or options.model,
        "num_prompts": len(records), "request_rate": _finite(options.request_rate, "inf"),
        "burstiness": _finite(options.burstiness, "inf"), "max_concurrency": options.max_concurrency,
        **_totals(summary), **_latencies(summary),
        "outcomes": {outcome.value: summary.outcomes.get(outcome, 0) for outcome in Outcome},
        "refused_by_status": {str(status): count for status, count in summary.refused_by_status.items()},
        "cached_input_tokens": summary.cached_input_tokens, "num_resent": summary.num_resent,
        **(_spread("queue", summary.queue) if summary.has_queued else {}), "stopped_by": stopped_by or None,
        "dataset_name": options.dataset.name, "seed": options.dataset.seed, "goodput_limits_ms": dict(options.goodput),
        "client_lag": {
            "sent_p99_ms": lag.sent_p99_ms, "sent_max_ms": lag.sent_max_ms, "loop_p99_ms": lag.loop_p99_ms,
            "loop_max_ms": lag.loop_max_ms, "queue_p99_ms": lag.queue_p99_ms, "limit_ms": lag.limit_ms,
            "warning": lag.warning or None},
    }
    if groups:
        body["groups"] = {name: {**_totals(group), **_latencies(group)} for name, group in groups.items()}
    return body | (_details(records) if detailed else {})


def _totals(summary: Summary) -> Json:
    tokens_in, tokens_out = summary.total_input_tokens, summary.total_output_tokens
    return {
        "duration": summary.duration_s, "completed": summary.completed, "failed": summary.not_completed,
        "total_input_tokens": tokens_in, "total_output_tokens": tokens_out,
        "request_throughput": summary.rate(summary.completed), "request_goodput": summary.goodput,
        "output_throughput": summary.rate(tokens_out), "total_token_throughput": summary.rate(tokens_in + tokens_out),
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }


def _latencies(summary: Summary) -> Json:
    body: Json = {}
    for name in METRICS:
        body |= _spread(name, summary.spreads[name])
    return body


def _spread(name: str, spread: Spread) -> Json:
    return {f"mean_{name}_ms": _finite(spread.mean), f"median_{name}_ms": _finite(spread.median),
            f"std_{name}_ms": _finite(spread.std),
            **{f"p{percentile:g}_{name}_ms": _finite(value) for percentile, value in spread.percentiles.items()}}


def _details(records: Sequence[RequestRecord]) -> Json:
    done = [record.outcome is Outcome.COMPLETED for record in records]
    return {
        "input_lens": [record.input_len for record in records],
        "output_lens": [record.output_len if ok else 0 for record, ok in zip(records, done, strict=True)],
        "ttfts": [record.ttft_s if ok else 0.0 for record, ok in zip(records, done, strict=True)],
        "itls": [record.itls_s for record in records],
        "latencies": [record.e2el_s for record in records],
        "start_times": [record.sent_s for record in records],
        "queue_times": [record.queue_s for record in records],
        "resent": [record.num_resent for record in records],
        "server_queue_times": [record.server_queue_s for record in records],
        "server_ttfts": [record.server_ttft_s for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
        "outcome_of_each": [record.outcome.value for record in records],
        "lags": [record.sent_s - record.due_s for record in records],
        "group_of_each": [record.group for record in records],
    }


def _finite(value: float, otherwise: Any = None) -> Any:
    return value if math.isfinite(value) else otherwise
