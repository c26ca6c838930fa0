"""What is counted of keys and tenants. Names of tenants are the operator's, of the key file: at most 1000 at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from common.metrics import counter, gauge, preset

KEYS = gauge("shoal_gateway_api_keys", "API keys that are accepted; 0: everybody is let in")
KEY_FILE_LOADS = preset(counter(
    "shoal_gateway_key_file_loads_total", "times that the key file was found changed, by what became of it",
    ["result"]), ("ok", "broken"))
KEY_FILE_BROKEN = gauge("shoal_gateway_key_file_broken", "1 while the key file cannot be used and older keys stand")
TENANT_REQUESTS = counter("shoal_gateway_tenant_requests_total", "POST requests let in, by tenant", ["tenant"])
TENANT_TOKENS = counter(
    "shoal_gateway_tenant_tokens_total", "tokens of requests that have ended, by tenant and kind", ["tenant", "kind"])
RATE_LIMITED = counter(
    "shoal_gateway_rate_limited_total", "requests refused by a rate limit, by tenant and limit", ["tenant", "limit"])
RATE_LIMIT_FAILURES = preset(counter(
    "shoal_gateway_rate_limit_failures_total", "rate limits that Redis could not be asked for, by call",
    ["call"]), ("admit", "charge", "show"))
RATE_LIMITS_CONNECTED = gauge("shoal_gateway_rate_limits_connected", "0 while Redis cannot be asked for rate limits")

TOKEN_KINDS: Final = ("prompt", "cached", "output")  # cached ones are prompt tokens as well
LIMITS: Final = ("requests", "tokens")


def forget_tenants(names: Iterable[str]) -> None:
    """Drop the series of tenants that are no more."""
    for name in names:
        TENANT_REQUESTS.remove(name)
        for kind in TOKEN_KINDS:
            TENANT_TOKENS.remove(name, kind)
        for limit in LIMITS:
            RATE_LIMITED.remove(name, limit)
