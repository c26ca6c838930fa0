"""The insides of gateway and tokenizer, and what all services share: loops, calls, leases, the bus."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import AT, EACH, increase, quantile, rate, total

_LOOP = Row("Event loops", (
    Panel("Delay, p99", "How late a timer fires. Above 5 ms every stream of the process waits.",
          (Query(quantile(.99, "shoal_event_loop_delay_seconds", "job, instance"), EACH),), "s",
          warn=.005, bad=.05),
    Panel("Stalls", "Share of samples (10 a second) that were more than 5 ms late.",
          (Query(f"{rate('shoal_event_loop_stalls_total', 'job, instance')} / "
                 f"{rate('shoal_event_loop_delay_seconds_count', 'job, instance')}", EACH),),
          "percentunit", warn=.05, bad=.2),
    Panel("CPU", "Cores in use.",
          (Query(rate("process_cpu_seconds_total", "job, instance"), EACH),), "short", warn=.9),
))
_GATEWAY = Row("Gateway", (
    Panel("By route", "Requests per second by route template.",
          (Query(rate("shoal_gateway_requests_total", "endpoint"), "{{endpoint}}"),), "reqps", stacked=True),
    Panel("In work", "Requests that hold a slot; the limit is max_concurrent_requests.",
          (Query(total("shoal_gateway_requests_in_flight", "instance"), "{{instance}}"),), "short"),
    Panel("Clients gone", "Requests whose client left before the end.",
          (Query(rate("shoal_gateway_aborted_total"), "aborted"),), "reqps"),
    Panel("Operations", "Duration by the OpenTelemetry conventions, 95th percentile.",
          (Query(quantile(.95, "gen_ai_server_request_duration_seconds", "gen_ai_operation_name"),
                 "{{gen_ai_operation_name}}"),), "s"),
    Panel("First token by operation", "By the OpenTelemetry conventions, 95th percentile.",
          (Query(quantile(.95, "gen_ai_server_time_to_first_token_seconds", "gen_ai_operation_name"),
                 "{{gen_ai_operation_name}}"),), "s"),
    Panel("Placed without a router", "Placements made by load because no router answered; body fields that were not "
          "known and ignored.",
          (Query(rate("shoal_gateway_routed_by_load_total"), "by load"),
           Query(rate("shoal_gateway_unknown_fields_total"), "unknown fields")), "reqps"),
))
_TOKENIZER = Row("Tokenizer", (
    Panel("Tokens", "Made from text, and turned into text.",
          (Query(rate("shoal_tokenizer_encoded_tokens_total"), "encoded"),
           Query(rate("shoal_tokenizer_decoded_tokens_total"), "decoded")), "short"),
    Panel("Time of a call", "Queue included, 95th percentile.",
          (Query(quantile(.95, "shoal_tokenizer_call_seconds", "call"), "{{call}}"),), "s", warn=.05, bad=.25),
    Panel("In work", "Calls in the pool, texts being made; and what was refused because a bound was reached.",
          (Query(total("shoal_tokenizer_queued", "instance"), "calls, {{instance}}"),
           Query(total("shoal_tokenizer_text_streams", "instance"), "texts, {{instance}}"),
           Query(rate("shoal_tokenizer_refused_total", "bound"), "refused: {{bound}}")), "short"),
))
_WIRE = Row("Between services", (
    Panel("Calls, p95", "Time of an answered unary call by method, at the server.",
          (Query(quantile(.95, "shoal_rpc_seconds", "job, method"), "{{job}} {{method}}"),), "s"),
    Panel("Failed calls", "By method and error code.",
          (Query(rate("shoal_rpc_errors_total", "job, method, code"), "{{job}} {{method}}: {{code}}"),), "reqps"),
    Panel("Leases", "Registrations (once a start, again after each lost lease) and failed heartbeats.",
          (Query(increase("shoal_registrations_total", "job"), "registered, {{job}}"),
           Query(increase("shoal_lease_failures_total", "job"), "failed, {{job}}")), "short"),
    Panel("Bus", "1 while connected; facts that were not published.",
          (Query(f"min by (job) (shoal_bus_connected{{{AT}}})", "{{job}}"),
           Query(rate("shoal_bus_dropped_total", "job"), "dropped, {{job}}")), "short"),
    Panel("Open files", "Share of the limit that a process uses.",
          (Query(f"max by (job, instance) (process_open_fds{{{AT}}} / process_max_fds{{{AT}}})", EACH),),
          "percentunit", warn=.7, bad=.9, maximum=1),
    Panel("Versions", "Processes by service and version.",
          (Query("count by (service, version) (shoal_service_info)", "{{service}} {{version}}"),), "short", "bargauge"),
))

GATEWAY_INTERNALS = Dashboard(
    "shoal-gateway", "shoal: gateway internals", "Loops, routes, text and calls.",
    (_LOOP, _GATEWAY, _TOKENIZER, _WIRE), jobs="gateway|tokenizer|router|prefill|decode|kvstore")
