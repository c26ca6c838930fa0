"""What `shoal status` says of each service: its record in the registry, its metrics, and what the supervisor sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.errors import ShoalError
from common.service_record import ServiceRecord
from stack.scrape import Sample, samples, summed
from stack.state_file import ProcessState

_SERVERS = frozenset({"nats", "valkey"})
_SERVICE_OF = {"mixed": "decode"}  # a mixed worker is a decode worker in its other role
_LOADS = {
    "shoal_requests_running": "running", "shoal_requests_waiting": "waiting", "shoal_kv_free_blocks": "free blocks",
    "shoal_gateway_requests_in_flight": "in flight", "shoal_tokenizer_queued": "queued",
    "shoal_router_index_blocks": "index blocks", "shoal_router_syncing_workers": "syncing",
}
_TIER_BLOCKS, _TIER_BYTES = "shoal_kvstore_blocks", "shoal_kvstore_used_bytes"
_DEGRADED = "shoal_router_degraded"


@dataclass(frozen=True, slots=True)
class Row:
    """One service or server. `up` is false for what should be there and is not."""

    service: str
    service_id: str
    state: str
    up: bool
    address: str = ""
    models: tuple[str, ...] = ()
    role: str = ""
    transports: tuple[str, ...] = ()  # of KV bytes, best first
    capacity: Mapping[str, int] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    tiers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of a store: tier → blocks, bytes
    lacks: tuple[str, ...] = ()  # what a router decides without
    restarts: int = 0


def rows_of(records: Sequence[ServiceRecord], processes: Mapping[str, ProcessState]) -> list[Row]:
    """Every registered service and every process of the supervisor that should be registered and is not."""
    rows = [_row(record, processes.get(record.service_id))
            for record in sorted(records, key=lambda r: (r.service, r.service_id))]
    listed = {row.service_id for row in rows} | _SERVERS
    return rows + [_missing(name, process) for name, process in processes.items() if name not in listed]


def _row(record: ServiceRecord, process: ProcessState | None) -> Row:
    try:
        found = samples(record.metrics_address or record.address)
    except ShoalError:
        found = None
    lacks = _lacks(found or ())
    state = "no metrics" if found is None else "degraded" if lacks and record.state == "ready" else record.state
    # A record outlives its process by the lease; the supervisor knows sooner.
    if process is not None and process.state != "ready":
        state = process.state
    sums = summed(found or ())
    return Row(
        record.service, record.service_id, state, state in ("ready", "degraded"), record.address, record.models,
        record.role, record.transports, record.capacity,
        {word: sums[name] for name, word in _LOADS.items() if name in sums}, _tiers(found or ()), lacks,
        process.restarts if process else 0)


def _missing(name: str, process: ProcessState) -> Row:
    kind = name.rsplit("-", 1)[0]
    return Row(_SERVICE_OF.get(kind, kind), name, process.state if process.state != "ready" else "not registered",
               False, process.address, restarts=process.restarts)


def _tiers(found: Iterable[Sample]) -> dict[str, dict[str, float]]:
    tiers: dict[str, dict[str, float]] = {}
    for sample in found:
        for name, word in ((_TIER_BLOCKS, "blocks"), (_TIER_BYTES, "bytes")):
            if sample.name == name and "tier" in sample.labels:
                tiers.setdefault(sample.labels["tier"], {})[word] = sample.value
    return tiers


def _lacks(found: Iterable[Sample]) -> tuple[str, ...]:
    return tuple(sample.labels.get("why", "") for sample in found if sample.name == _DEGRADED and sample.value)
