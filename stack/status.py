"""`shoal status`: who is registered, what the supervisor sees, and whether NATS and Redis answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import ConfigError, ShoalError
from common.registry import RedisRegistry
from common.service_record import ServiceRecord
from stack.gates import ask
from stack.scrape import scrape
from stack.state_file import ProcessState, StackState, default_state_dir, find_stack

_ASK_TIMEOUT_S = 2.0
_PIPED_WIDTH = 200
_LOADS = {"shoal_requests_running": "running", "shoal_requests_waiting": "waiting",
          "shoal_kv_free_blocks": "free blocks", "shoal_gateway_requests_in_flight": "in flight"}


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
    capacity: Mapping[str, int] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    restarts: int = 0


def print_status(state_dir: Path | None, redis_url: str, nats_url: str, as_json: bool) -> bool:
    """Print the table; True when all is up. Raises `NotFound` when no stack runs and no URL is given."""
    stack = None if redis_url else find_stack(state_dir or default_state_dir())
    rows = asyncio.run(_look(stack, redis_url or (stack.redis_url if stack else ""),
                             nats_url or (stack.nats_url if stack else "")))
    if as_json:
        print(json.dumps({"url": stack.url if stack else None, "state": stack.state if stack else None,
                          "services": [dataclasses.asdict(row) for row in rows]}, indent=1))
    else:
        _print_table(rows, stack)
    return all(row.up for row in rows)


async def _look(stack: StackState | None, redis_url: str, nats_url: str) -> list[Row]:
    servers = [await _server("redis", redis_url, 6379, b"PING\r\n")]
    if nats_url:
        servers.append(await _server("nats", nats_url, 4222, b""))
    try:
        registry = await RedisRegistry.connect(redis_url, _ASK_TIMEOUT_S)
        try:
            records = await registry.list()
        finally:
            await registry.close()
    except ShoalError:
        records = []
    return servers + await asyncio.to_thread(rows_of, records, stack.processes if stack else {})


async def _server(name: str, url: str, default_port: int, question: bytes) -> Row:
    """Any answer is a life sign: a server with a password refuses PING but is there."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or default_port
    except ValueError:
        raise ConfigError(f"{name} URL is not a URL", param=f"{name}_url") from None
    answered = bool(await ask(host, port, question))
    return Row(name, name, "reachable" if answered else "unreachable", answered, f"{host}:{port}")


def rows_of(records: list[ServiceRecord], processes: Mapping[str, ProcessState]) -> list[Row]:
    """Every registered service and every process of the supervisor that should be registered and is not."""
    rows = []
    for record in sorted(records, key=lambda r: (r.service, r.service_id)):
        process = processes.get(record.service_id)
        load = _load(record)
        state = record.state if load is not None else "no metrics"
        # A record outlives its process by the lease; the supervisor knows sooner.
        if process is not None and process.state != "ready":
            state = process.state
        rows.append(Row(record.service, record.service_id, state, state == "ready", record.address, record.models,
                        record.role, record.capacity, load or {}, process.restarts if process else 0))
    listed = {row.service_id for row in rows} | {"nats", "valkey"}
    rows += [Row(name.rsplit("-", 1)[0], name, process.state if process.state != "ready" else "not registered", False,
                 process.address, restarts=process.restarts)
             for name, process in processes.items() if name not in listed]
    return rows


def _load(record: ServiceRecord) -> dict[str, float] | None:
    """None when its metrics do not answer."""
    try:
        seen = scrape(record.metrics_address or record.address)
    except ShoalError:
        return None
    return {word: seen[name] for name, word in _LOADS.items() if name in seen}


def _print_table(rows: list[Row], stack: StackState | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    if stack is not None:
        console.print(f"{stack.url}  {stack.state}  (pid {stack.pid}, logs in {stack.log_dir})", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("id", "state", "address", "models", "role", "load", "capacity", "restarts"):
        table.add_column(column, no_wrap=column in ("id", "state", "address", "role"))
    for row in rows:
        table.add_row(row.service_id, f"[{'green' if row.up else 'red'}]{row.state}[/]", row.address,
                      ", ".join(row.models), row.role, _facts(row.load), _facts(row.capacity), str(row.restarts or ""))
    console.print(table)


def _facts(facts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in facts.items())
