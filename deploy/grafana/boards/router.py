"""What the router decides, on which facts, and how right its predictions are."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import AT, mean, quantile, rate, total

_DECISIONS = Row("Decisions", (
    Panel("By source of the prompt's KV", "Placements per second; refused ones among them.",
          (Query(rate("shoal_router_decisions_total", "source"), "{{source}}"),), "reqps", stacked=True),
    Panel("Refused", "Requests that were not placed, by reason.",
          (Query(rate("shoal_router_refused_total", "reason"), "{{reason}}"),), "reqps", bad=1),
    Panel("Time of a decision", "One turn of the event loop.",
          tuple(Query(quantile(q, "shoal_router_decision_seconds"), f"p{q * 100:g}") for q in (.5, .99)), "s",
          warn=.005, bad=.02),
))
_PREDICTION = Row("Predicted and actual time to first token", (
    Panel("Mean", "Of the same requests: as predicted at the decision, and as the gateway measured it.",
          (Query(mean("shoal_router_predicted_ttft_seconds", "source"), "predicted, {{source}}"),
           Query(mean("shoal_router_actual_ttft_seconds", "source"), "actual, {{source}}")), "s"),
    Panel("Error", "Distance between the two, 50th and 95th percentile.",
          tuple(Query(quantile(q, "shoal_router_ttft_error_seconds", "source"), f"p{q * 100:g} {{{{source}}}}")
                for q in (.5, .95)), "s", warn=.5, bad=2),
    Panel("Actual over predicted", "1 is right; above 1 the router is an optimist. Median.",
          (Query(quantile(.5, "shoal_router_ttft_ratio", "source"), "{{source}}"),), "short", warn=1.5, bad=3),
))
_INDEX = Row("Index", (
    Panel("Event age by worker", "Since the last word of each worker; idle ones speak every 2 s.",
          (Query(f"max by (worker_id) (shoal_router_event_age_seconds{{{AT}}})", "{{worker_id}}"),), "s", warn=10,
          bad=30),
    Panel("Batches", "KV event batches by what became of them; a gap is repaired by a snapshot.",
          (Query(rate("shoal_router_kv_batches_total", "fate"), "{{fate}}"),), "short", stacked=True),
    Panel("Snapshots", "Taken when a worker is new or a batch was lost.",
          (Query(rate("shoal_router_snapshots_total", "result"), "{{result}}"),), "short"),
    Panel("Blocks", "Different block hashes known to each replica.",
          (Query(total("shoal_router_index_blocks", "instance"), "{{instance}}"),), "short"),
    Panel("Workers", "Followed, and of them waiting for a snapshot.",
          (Query(total("shoal_router_index_workers", "instance"), "followed, {{instance}}"),
           Query(total("shoal_router_syncing_workers", "instance"), "syncing, {{instance}}")), "short"),
    Panel("Missing facts", "Decisions without NATS or Redis; 1 while a connection is down.",
          (Query(rate("shoal_router_degraded_decisions_total", "why"), "decided with {{why}}"),
           Query(f"max by (why) (shoal_router_degraded{{{AT}}})", "now: {{why}}")), "short", bad=1),
))

ROUTER = Dashboard(
    "shoal-router", "shoal: router", "Decisions, predictions, and how fresh the index is.",
    (_DECISIONS, _PREDICTION, _INDEX), jobs="router")
