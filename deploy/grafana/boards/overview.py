"""Is the service as good as promised, and if not, where to look."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import AT, EACH, GATEWAY, WINDOW, buckets, quantile, rate, total

_GOOD = rate("shoal_gateway_slo_good_total", "", GATEWAY)
_JUDGED = rate("shoal_gateway_slo_requests_total", "", GATEWAY)

_NOW = Row("Now", (
    Panel("Goodput", "Share of judged requests that met slo_ttft_ms and slo_tpot_ms and did not fail.",
          (Query(f"{_GOOD} / {_JUDGED}"),), "percentunit", "stat", 4, 5, bad=.95, warn=.99, low_is_bad=True,
          decimals=2),
    Panel("TTFT, p95", "Request received to first content chunk written, streams, 95th percentile.",
          (Query(quantile(.95, "shoal_gateway_ttft_seconds", "", GATEWAY)),), "s", "stat", 4, 5, warn=1, bad=2),
    Panel("TPOT, p95", "Mean time per output token of a stream, 95th percentile over streams.",
          (Query(quantile(.95, "shoal_gateway_tpot_seconds", "", GATEWAY)),), "s", "stat", 4, 5, warn=.05, bad=.1),
    Panel("Output tokens/s", "Tokens of finished requests per second.",
          (Query(rate("shoal_gateway_output_tokens_total", "", GATEWAY)),), "short", "stat", 4, 5),
    Panel("In work", "Requests that hold a slot of a gateway.",
          (Query(total("shoal_gateway_requests_in_flight")),), "short", "stat", 4, 5),
    Panel("Leaked blocks", "KV blocks without an owner on any worker. Anything but 0 is a bug.",
          (Query('sum(shoal_kv_leaked_blocks{model_name=~"$model_name"})'),), "short", "stat", 4, 5, bad=1),
))
_LATENCY = Row("Latency", (
    Panel("Time to first token", "Streams, by percentile; the dots are traces.",
          tuple(Query(quantile(q, "shoal_gateway_ttft_seconds", "", GATEWAY), f"p{q * 100:g}", exemplars=True)
                for q in (.5, .95, .99)), "s", warn=1, bad=2),
    Panel("Gap between content chunks", "Each gap of each stream, by percentile.",
          tuple(Query(quantile(q, "shoal_gateway_itl_seconds", "", GATEWAY), f"p{q * 100:g}")
                for q in (.5, .95, .99)), "s", warn=.05, bad=.1),
    Panel("Whole request", "Received to last byte, of requests that ended well, by percentile.",
          tuple(Query(quantile(q, "shoal_gateway_e2e_seconds", "", GATEWAY), f"p{q * 100:g}")
                for q in (.5, .95, .99)), "s"),
    Panel("Time to first token, all of it", "How many streams fell into each range; two bands mean two kinds of work.",
          (Query(buckets("shoal_gateway_ttft_seconds", GATEWAY), "{{le}}", exemplars=True),), "s", "heatmap", 12),
    Panel("Limits missed", "Judged requests that missed a limit, by limit. The limits are the gateway's configuration.",
          (Query(rate("shoal_gateway_slo_missed_total", "limit", GATEWAY), "{{limit}}"),), "reqps", width=6,
          stacked=True),
    Panel("Budget burn", "Share of bad requests over the 1 % that the objective allows; above 14.4 a month's budget "
          "is gone in two days.",
          tuple(Query(f'shoal:slo_bad:ratio_rate{w}{{model=~"$model_name"}} / 0.01', f"{{{{model}}}} {w}")
                for w in ("5m", "1h", "6h")), "short", width=6, warn=1, bad=14.4),
))
_DEMAND = Row("Demand", (
    Panel("Requests by status", "Answers per second. 499: the client went away first.",
          (Query(rate("shoal_gateway_requests_total", "status", GATEWAY), "{{status}}"),), "reqps", stacked=True),
    Panel("Refusals and broken streams", "Requests answered with an error, and streams that ended in an error event.",
          (Query(f"{rate('shoal_gateway_refused_total', 'code')} > 0", "refused: {{code}}"),
           Query(f"{rate('shoal_gateway_stream_errors_total', 'code')} > 0", "stream: {{code}}")), "reqps", bad=1),
    Panel("Tokens", "Prompt tokens (cached ones among them) and output tokens of finished requests.",
          (Query(rate("shoal_gateway_prompt_tokens_total", "", GATEWAY), "prompt"),
           Query(rate("shoal_gateway_cached_tokens_total", "", GATEWAY), "of them cached"),
           Query(rate("shoal_gateway_output_tokens_total", "", GATEWAY), "output")), "short"),
    Panel("Prompt length", "Prompt tokens of finished requests.",
          tuple(Query(quantile(q, "shoal_gateway_request_prompt_tokens", "", GATEWAY), f"p{q * 100:g}")
                for q in (.5, .95)), "short"),
    Panel("Output length", "Output tokens of finished requests.",
          tuple(Query(quantile(q, "shoal_gateway_request_output_tokens", "", GATEWAY), f"p{q * 100:g}")
                for q in (.5, .95)), "short"),
    Panel("Moved requests", "Placed again before the first token, and streams that went on on another worker.",
          (Query(rate("shoal_gateway_replacements_total"), "replaced"),
           Query(rate("shoal_gateway_migrations_total"), "migrated")), "reqps", warn=.1),
))
_HEALTH = Row("Services", (
    Panel("Replicas up", "Processes that answer Prometheus, by service.",
          (Query('sum by (job) (up{job=~"$job"})', "{{job}}"),), "short"),
    Panel("CPU", "Cores in use by a process. One asyncio process cannot use much more than one.",
          (Query(f"sum by (job, instance) (rate(process_cpu_seconds_total{{{AT}}}[{WINDOW}]))", EACH),),
          "short", warn=.9),
    Panel("Memory", "Resident memory of each process.",
          (Query(f"process_resident_memory_bytes{{{AT}}}", EACH),), "bytes"),
))

OVERVIEW = Dashboard(
    "shoal-overview", "shoal: overview", "Goodput, latency and demand as clients see them.",
    (_NOW, _LATENCY, _DEMAND, _HEALTH), jobs="gateway|tokenizer|router|prefill|decode|kvstore",
    model_values="label_values(shoal_gateway_requests_total, model)")
