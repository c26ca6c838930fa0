"""What the gateway counts. Labels take values from closed sets: known models, route templates, statuses, codes."""

from __future__ import annotations

from common.errors import codes
from common.metrics import ITL_BUCKETS, TOKEN_BUCKETS, TTFT_BUCKETS, counter, gauge, histogram, preset

UNKNOWN_MODEL = "unknown"
UNMATCHED_PATH = "unmatched"
_E2E_BUCKETS = (.05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

REQUESTS = counter(
    "shoal_gateway_requests_total", "requests answered, by route template, model and status",
    ["endpoint", "model", "status"])
TTFT_S = histogram(
    "shoal_gateway_ttft_seconds", "request received to first content chunk written (streams)", TTFT_BUCKETS, ["model"])
ITL_S = histogram("shoal_gateway_itl_seconds", "gap between content chunks of a stream", ITL_BUCKETS, ["model"])
E2E_S = histogram("shoal_gateway_e2e_seconds", "request received to last byte", _E2E_BUCKETS, ["model"])
PROMPT_TOKENS = counter("shoal_gateway_prompt_tokens_total", "prompt tokens of finished requests", ["model"])
CACHED_TOKENS = counter("shoal_gateway_cached_tokens_total", "prompt tokens that were prefix hits", ["model"])
OUTPUT_TOKENS = counter("shoal_gateway_output_tokens_total", "output tokens of finished requests", ["model"])
REQUEST_PROMPT_TOKENS = histogram(
    "shoal_gateway_request_prompt_tokens", "prompt tokens of a finished request", TOKEN_BUCKETS, ["model"])
REQUEST_OUTPUT_TOKENS = histogram(
    "shoal_gateway_request_output_tokens", "output tokens of a finished request", TOKEN_BUCKETS, ["model"])
STREAM_TPOT_S = histogram(
    "shoal_gateway_tpot_seconds", "mean time per output token of a stream, after its first", ITL_BUCKETS, ["model"])
IN_FLIGHT = gauge("shoal_gateway_requests_in_flight", "requests that hold a slot")
ABORTED = counter("shoal_gateway_aborted_total", "requests whose client went away")
REFUSED = preset(counter(
    "shoal_gateway_refused_total", "requests answered with an error, by error code", ["code"]), codes())
STREAM_ERRORS = preset(counter(
    "shoal_gateway_stream_errors_total", "streams that ended in an error event", ["code"]), codes())
REPLACED = counter("shoal_gateway_replacements_total", "requests whose worker failed before their first token")
MIGRATED = counter("shoal_gateway_migrations_total", "running streams whose worker failed and that moved on")
ROUTED_BY_LOAD = counter("shoal_gateway_routed_by_load_total", "placements made here because no router made them")
UNKNOWN_FIELDS = counter("shoal_gateway_unknown_fields_total", "body fields that were not known and ignored")
