"""What a decode worker can be told."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from engine.worker_config import WorkerConfig


class DecodeConfig(WorkerConfig):
    """A decode worker: continuous batching, with prompts from a prefill worker, the store, or its own engine."""

    service: ClassVar[str] = "decode"

    role: str = Field("mixed", pattern="^(decode|mixed)$", description="decode: prompts are to come from elsewhere")
    transport: str = Field("auto", pattern="^(auto|shm|grpc)$", description="how KV comes in; auto: shm on one host")
    handoff_timeout_s: float = Field(30.0, gt=0, le=3600, description="the longest a hand-off may take")
    handoff_stall_s: float = Field(3.0, gt=0, le=600, description="a prefill worker silent for this long is given up")
    heartbeat_s: float = Field(1.0, gt=0, le=60, description="the longest silence towards a gateway")
