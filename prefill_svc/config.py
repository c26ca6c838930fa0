"""What a prefill worker can be told."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from engine.worker_config import WorkerConfig


class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts for decode workers, stateless but for its cache."""

    service: ClassVar[str] = "prefill"

    max_transfers: int = Field(16, ge=1, le=4096, description="hand-offs granted at once; one more is refused")
    grant_lease_s: float = Field(5.0, gt=0, le=600, description="a grant that is not used ends after this")
