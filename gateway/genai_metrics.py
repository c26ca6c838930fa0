"""Server metrics of the OpenTelemetry conventions for generative AI, in their Prometheus form.

Source: semantic-conventions-genai, names and bucket limits; the server's address is Prometheus's own `instance`.
"""

from __future__ import annotations

from typing import Final

from common.metrics import histogram

PROVIDER: Final = "shoal"
OPERATIONS: Final = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}  # by route template
_LABELS: Final = (
    "gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model", "error_type")
_OUTPUT_TOKEN_BUCKETS: Final = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5)
_FIRST_TOKEN_BUCKETS: Final = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10)

DURATION_S = histogram(
    "gen_ai_server_request_duration_seconds", "request received to its last byte",
    tuple(.01 * 2**n for n in range(14)), _LABELS)
TIME_PER_OUTPUT_TOKEN_S = histogram(
    "gen_ai_server_time_per_output_token_seconds", "mean time per output token after the first, of streams",
    _OUTPUT_TOKEN_BUCKETS, _LABELS)
TIME_TO_FIRST_TOKEN_S = histogram(
    "gen_ai_server_time_to_first_token_seconds", "request received to the first content of a stream",
    _FIRST_TOKEN_BUCKETS, _LABELS)


def record(
    route: str, model: str, error_code: str, total_s: float, ttft_s: float | None, tpot_s: float | None,
    exemplar: dict[str, str] | None,
) -> None:
    """One request that has ended. Routes that generate nothing are left out; `model` is one that exists, or unknown."""
    operation = OPERATIONS.get(route)
    if operation is None:
        return
    labels = (operation, PROVIDER, model, model, error_code)
    DURATION_S.labels(*labels).observe(total_s, exemplar)
    if ttft_s is not None:
        TIME_TO_FIRST_TOKEN_S.labels(*labels).observe(ttft_s, exemplar)
    if tpot_s is not None:
        TIME_PER_OUTPUT_TOKEN_S.labels(*labels).observe(tpot_s, exemplar)
