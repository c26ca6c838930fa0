"""What a store node can be told."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from common.config import ServiceConfig


class KvStoreConfig(ServiceConfig):
    """A store node: KV blocks of any model, in DRAM and, if asked, on SSD."""

    service: ClassVar[str] = "kvstore"

    dram_bytes: int = Field(1 << 30, ge=1 << 16, description="memory for blocks; taken as it is used")
    ssd_path: str = Field("", description="file of the SSD tier, of this replica alone; empty: no such tier")
    ssd_bytes: int = Field(4 << 30, ge=1 << 17, description="size of the SSD tier; taken at the first start")
    shm_dir: str = Field("", description="folder in memory that this host's workers share; empty: /dev/shm/shoal-<uid>")
    slab_bytes: int = Field(64 << 20, ge=1 << 12, description="blocks of one size lie in slabs; a quarter tier at most")
    max_lease_s: float = Field(30.0, gt=0, le=600, description="longest lease of a reader or writer")
    max_leased_fraction: float = Field(0.5, gt=0, le=1, description="part of the DRAM that readers may hold")
    max_put_fraction: float = Field(0.5, gt=0, le=1, description="part of the DRAM for unfinished puts; a writer: half")
    sweep_interval_s: float = Field(0.25, gt=0, le=60, description="how often ended leases are collected")
