"""Prefill and decode, in the order in which a request passes them, and the KV that goes between."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import AT, EACH, WORKER, mean, quantile, rate, total

_QUEUES = Row("Queues, by stage", (
    Panel("Decode", "Requests: admitting (KV is being asked for), awaiting_kv (blocks reserved), waiting, running.",
          (Query(total("shoal_stage_requests", "stage", f'{WORKER},stage!~"held|granted|transferring"'), "{{stage}}"),),
          "short", stacked=True),
    Panel("Prefill", "Hand-offs: granted a place, transferring; prompts computed and held until they are sent.",
          (Query(total("shoal_stage_requests", "stage", f'{WORKER},stage=~"held|granted|transferring"'), "{{stage}}"),),
          "short", stacked=True),
    Panel("Tokens to compute", "Prompt tokens ahead of a new request, by service.",
          (Query(total("shoal_waiting_tokens", "job, instance", WORKER), EACH),), "short"),
))
_TIMES = Row("Times on decode workers", (
    Panel("To the first token", "From the arrival at the worker: hand-off, loads and own prefill included.",
          tuple(Query(quantile(q, "shoal_worker_ttft_seconds", "", WORKER), f"p{q * 100:g}", exemplars=True)
                for q in (.5, .95, .99)), "s", warn=1, bad=2),
    Panel("Between tokens", "Gap between two steps, weighted by the requests that got a token.",
          tuple(Query(quantile(q, "shoal_worker_itl_seconds", "", WORKER), f"p{q * 100:g}")
                for q in (.5, .95, .99)), "s", warn=.05, bad=.1),
    Panel("Where the time goes", "Mean of each part of a request.",
          (Query(mean("shoal_worker_queue_seconds", "", WORKER), "queue"),
           Query(mean("shoal_worker_prefill_seconds", "", WORKER), "hand-off and prefill"),
           Query(mean("shoal_worker_decode_seconds", "", WORKER), "decode")), "s", stacked=True),
))
_HAND_OFF = Row("Hand-off", (
    Panel("Admissions", "How prompts came in: reserved (KV from elsewhere), plain (computed here), no_room (the cap on "
          "awaiting blocks was reached, computed here).",
          (Query(rate("shoal_admissions_total", "how"), "{{how}}"),), "reqps", stacked=True),
    Panel("Hand-offs", "Begun, and ended early; the rest of a prompt is then computed by decode.",
          (Query(rate("shoal_kv_transfers_total", "transport"), "begun, {{transport}}"),
           Query(rate("shoal_kv_transfer_fallbacks_total", "transport"), "ended early, {{transport}}")), "reqps"),
    Panel("Time of a hand-off", "Asked for a slot to the last block in place.",
          tuple(Query(quantile(q, "shoal_kv_hand_off_seconds", "transport"), f"p{q * 100:g} {{{{transport}}}}")
                for q in (.5, .95)), "s", warn=1, bad=5),
    Panel("KV moved", "Bytes per second by direction and transport; receive and send are the two ends of one hand-off.",
          (Query(rate("shoal_kv_copy_bytes_total", "direction, transport"), "{{direction}} {{transport}}"),), "Bps"),
    Panel("Speed while bytes move", "Bytes over the time of the copies alone: compare with the machine's memcpy.",
          (Query(f"{rate('shoal_kv_copy_bytes_total', 'direction, transport')} / "
                 f"{rate('shoal_kv_copy_seconds_sum', 'direction, transport')}", "{{direction}} {{transport}}"),),
          "Bps"),
    Panel("Overlap", "Share of hand-offs whose first block landed before the prompt was computed.",
          (Query(f"{rate('shoal_kv_transfer_overlapped_total', 'transport')} / "
                 f"{rate('shoal_kv_transfers_total', 'transport')}", "{{transport}}"),), "percentunit", maximum=1),
))
_PREFILL = Row("Prefill workers", (
    Panel("Prompt tokens", "Of hand-offs: computed, and taken from the cache or the store.",
          (Query(rate("shoal_kv_sent_computed_tokens_total"), "computed"),
           Query(rate("shoal_kv_sent_cached_tokens_total"), "cached")), "short", stacked=True),
    Panel("Speed", "Prompt tokens per second of steps that compute many, smoothed.",
          (Query(f"shoal_engine_prefill_tokens_per_second{{{WORKER}}}", EACH),), "short"),
    Panel("Refusals of workers", "Requests that a decode worker answered with an error, by code.",
          (Query(f"{rate('shoal_worker_refused_total', 'code', AT)} > 0", "{{code}}"),), "reqps", bad=1),
))

PREFILL_DECODE = Dashboard(
    "shoal-prefill-decode", "shoal: prefill, decode and transfer", "Queues by stage, times, and KV on its way.",
    (_QUEUES, _TIMES, _HAND_OFF, _PREFILL), jobs="prefill|decode",
    model_values="label_values(shoal_kv_blocks, model_name)")
