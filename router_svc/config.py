"""What a router can be told."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from common.config import ServiceConfig


class RouterConfig(ServiceConfig):
    """A router: places requests of all models on the workers that are registered."""

    service: ClassVar[str] = "router"

    max_index_blocks: int = Field(1_000_000, ge=1024, description="block hashes in the index; about 200 MB a million")
    mirror_to_redis: bool = Field(True, description="mirror the index, so that a router that starts knows it at once")
    overlay_ttl_s: float = Field(5.0, gt=0, le=600, description="how long a placement stands in for a worker's events")
    max_overlay_blocks: int = Field(200_000, ge=0, description="blocks expected on workers and not announced yet")
    load_stale_s: float = Field(3.0, gt=0, le=600, description="an older load report says nothing of a queue")
    load_poll_s: float = Field(1.0, gt=0, le=60, description="how often workers that report no load are asked for it")
    max_decisions: int = Field(10_000, ge=1, le=10_000_000, description="decision records kept for `Explain`")
    local_prefill_tokens: int = Field(128, ge=0, description="an uncached suffix up to this is never handed off")
    handoff_patience: float = Field(
        4.0, ge=1,
        description="decode workers compute long prompts themselves when hand-offs take this many times as long")
    near_tie: float = Field(0.1, ge=0, le=10, description="candidates within this part of the best price go by load")
    itl_limit_s: float = Field(0.0, ge=0, le=60, description="time between tokens that placements keep to; 0: no limit")
    prefill_tokens_per_s: float = Field(2000.0, gt=0, description="of a worker, until one has measured it")
    step_s: float = Field(0.02, gt=0, description="engine step, until a worker has measured it")
    transfer_bytes_per_s: float = Field(1e9, gt=0, description="KV bytes moved, until a worker has measured it")
    hop_s: float = Field(0.005, ge=0, description="fixed cost of a hand-off")
