"""The wire-free words between whoever places a request and the router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. An empty `prefill_worker_id` means that the decode worker computes the prompt."""

    decode_worker_id: str
    decode_incarnation: str = ""
    prefill_worker_id: str = ""
    prefill_incarnation: str = ""
    prefill_address: str = ""
    predicted_cached_tokens: int = 0
    predicted_ttft_s: float = 0.0
    decision_id: str = ""


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a placement depends on. `exclude` names workers on which this request has already failed."""

    request_id: str
    model: str
    block_hashes: tuple[bytes, ...]
    num_prompt_tokens: int
    max_tokens: int
    cache_salt: str = ""
    affinity_key: str = ""
    timeout_s: float = 0.0
    exclude: tuple[str, ...] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What really happened; times in seconds since the request was received."""

    request_id: str
    model: str
    decision_id: str = ""
    decode_worker_id: str = ""
    prefill_worker_id: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft_s: float = 0.0
    mean_itl_s: float = 0.0
    max_itl_s: float = 0.0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    finish_reason: str = ""  # of common.generation.FinishReason
    error_code: str = ""
    attempts: int = 1


class RouterPort(Protocol):
    """The router as its callers see it."""

    async def route(self, query: RouteQuery) -> Placement:
        """Raises `Unavailable` when no router answers, `Overloaded` for a priced refusal."""

    async def publish(self, outcome: RequestOutcome) -> None:
        """Tell the routers how a request went; a fact, never waited for."""
