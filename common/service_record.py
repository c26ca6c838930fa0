"""What a service says of itself in the registry."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from common.block_hash import HASH_SCHEME


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a worker's KV blocks are. Two workers of one model must agree on all of it."""

    model: str
    revision: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_layout: str = "block-major"
    hash_scheme: str = HASH_SCHEME


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """One live replica. `incarnation` is new with every process life; `lease` counts re-registrations within it."""

    service: str  # gateway, tokenizer, decode, ...
    service_id: str
    incarnation: str
    address: str  # host:port of gRPC (gateway: of HTTP)
    metrics_address: str = ""
    models: tuple[str, ...] = ()
    role: str = ""  # workers: prefill, decode, mixed
    fingerprint: Fingerprint | None = None
    capacity: dict[str, int] = field(default_factory=dict)  # e.g. num_blocks, max_num_seqs, max_model_len
    state: str = "ready"  # ready, draining
    lease: int = 0
    started_at_unix_s: float = 0.0
    host_id: str = ""  # equal for processes that share memory files
    transports: tuple[str, ...] = ()  # of KV bytes, best first
    version: str = ""

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> ServiceRecord:
        """Unknown fields of a newer version are dropped."""
        raw: dict[str, Any] = json.loads(text)
        fingerprint = raw.pop("fingerprint", None)
        known = {f.name for f in dataclasses.fields(ServiceRecord)} - {"fingerprint"}
        record = {k: v for k, v in raw.items() if k in known}
        for name in ("models", "transports"):
            record[name] = tuple(record.get(name, ()))
        names = {f.name for f in dataclasses.fields(Fingerprint)}
        parsed = Fingerprint(**{k: v for k, v in fingerprint.items() if k in names}) if fingerprint else None
        return ServiceRecord(**record, fingerprint=parsed)
