"""Workers, queries and a directory that says what it is told, for the router's tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from common.directory import Directory
from common.placement import RouteQuery
from common.registry import MemoryRegistry
from common.service_record import Fingerprint, ServiceRecord
from router_svc.load import LoadReport, WorkerState

MODEL = "m"
PRINT = Fingerprint(MODEL, "r1", "float32", 16, 2, 1, 8)  # 128 bytes of KV a token and layer pair


def block(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(first: int, length: int) -> tuple[bytes, ...]:
    return tuple(block(first + i) for i in range(length))


def record(worker_id: str, service: str = "decode", incarnation: str = "a", **changes: Any) -> ServiceRecord:
    base = ServiceRecord(
        service, worker_id, incarnation, "127.0.0.1:1", models=(MODEL,),
        role="mixed" if service == "decode" else service, fingerprint=PRINT,
        capacity={"num_blocks": 1000, "max_num_seqs": 8, "max_model_len": 8192}, started_at_unix_s=100.0)
    return dataclasses.replace(base, **changes)


def worker(worker_id: str, role: str = "mixed", *, cached: int = 0, placed: int = 0, **report: Any) -> WorkerState:
    """A worker of 1,000 blocks that measured 1,000 prompt tokens/s and steps of 10 ms."""
    figures: dict[str, Any] = {
        "num_blocks": 1000, "num_free_blocks": 1000, "step_s": 0.01, "prefill_tokens_per_s": 1000.0,
        "transfer_bytes_per_s": 1e8, **report}
    return WorkerState(
        worker_id, "a", f"{worker_id}:1", role, PRINT, 8, 8192, LoadReport(worker_id, "a", **figures), 0.1,
        num_placed=placed, cached_tokens=cached)


def query(request_id: str = "r1", **changes: Any) -> RouteQuery:
    base = RouteQuery(request_id, MODEL, chain(0, 10), num_prompt_tokens=165, max_tokens=16)
    return dataclasses.replace(base, **changes)


async def directory_of(*records: ServiceRecord) -> tuple[Directory, MemoryRegistry]:
    """Not polling: `refresh` it. A record that leaves the registry is dropped at the next refresh but one."""
    registry = MemoryRegistry()
    for one in records:
        await registry.register(one, 60)
    directory = Directory(registry, grace_s=0.0)
    await directory.refresh()
    return directory, registry
