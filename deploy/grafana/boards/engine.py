"""The engine of each worker: what a step does, and the device it runs on."""

from __future__ import annotations

from deploy.grafana.panel import Dashboard, Panel, Query, Row
from deploy.grafana.promql import AT, EACH, WORKER, mean, quantile, rate, total

_STEPS = Row("Steps", (
    Panel("Steps", "Steps with work per second.",
          (Query(rate("shoal_engine_steps_total", "job, instance", WORKER), EACH),), "short"),
    Panel("Time of a step", "Smoothed, as it is told to the router.",
          (Query(f"shoal_engine_step_seconds{{{WORKER}}}", EACH),), "s", warn=.1),
    Panel("Requests of a step", "How many requests a step brought something for; the mean.",
          (Query(mean("shoal_worker_step_outputs", "instance", WORKER), "{{instance}}"),), "short"),
    Panel("Tokens", "Drawn, and of admitted prompts.",
          (Query(rate("shoal_generated_tokens_total", "job", WORKER), "drawn, {{job}}"),
           Query(rate("shoal_prompt_tokens_total", "job", WORKER), "prompt, {{job}}")), "short"),
    Panel("Running and waiting", "Requests with blocks, and in the queue.",
          (Query(total("shoal_requests_running", "job", WORKER), "running, {{job}}"),
           Query(total("shoal_requests_waiting", "job", WORKER), "waiting, {{job}}")), "short"),
    Panel("Preemptions", "Requests put back into the queue because blocks ran out; each computes its tokens again.",
          (Query(rate("shoal_preemptions_total", "job, instance", WORKER), EACH),), "short", warn=.1,
          bad=1),
))
_REQUESTS = Row("Requests", (
    Panel("Ended", "By reason.",
          (Query(rate("shoal_engine_requests_total", "reason", WORKER), "{{reason}}"),), "reqps", stacked=True),
    Panel("Computed prompt tokens", "Of a request, on this worker; 0 to 1 is a whole hit.",
          tuple(Query(quantile(q, "shoal_worker_request_computed_tokens", "", WORKER), f"p{q * 100:g}")
                for q in (.5, .95)), "short"),
    Panel("Output limit and length", "max_tokens as asked, and tokens as drawn; medians.",
          (Query(quantile(.5, "shoal_worker_request_max_tokens", "", WORKER), "asked"),
           Query(quantile(.5, "shoal_worker_request_output_tokens", "", WORKER), "drawn")), "short"),
))
_GPU = Row("GPU (series only where there is one)", (
    Panel("Utilisation", "Share of time in which a kernel ran.",
          (Query(f"max by (gpu) (shoal_gpu_utilization_ratio{{{AT}}})", "GPU {{gpu}}"),), "percentunit", maximum=1),
    Panel("Memory", "In use, of what there is.",
          (Query(f"max by (gpu) (shoal_gpu_memory_used_bytes{{{AT}}})", "used, GPU {{gpu}}"),
           Query(f"max by (gpu) (shoal_gpu_memory_capacity_bytes{{{AT}}})", "capacity, GPU {{gpu}}")), "bytes"),
    Panel("Power and temperature", "Watts; degrees Celsius.",
          (Query(f"max by (gpu) (shoal_gpu_power_watts{{{AT}}})", "W, GPU {{gpu}}"),
           Query(f"max by (gpu) (shoal_gpu_temperature_celsius{{{AT}}})", "°C, GPU {{gpu}}")), "short"),
))

ENGINE = Dashboard(
    "shoal-engine", "shoal: engine", "Steps, requests, GPU.", (_STEPS, _REQUESTS, _GPU), jobs="prefill|decode",
    model_values="label_values(shoal_kv_blocks, model_name)")
