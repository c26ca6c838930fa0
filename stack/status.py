"""`shoal status`: who is registered, what the supervisor sees, and whether NATS and Redis answer."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from common.config import ServiceConfig
from common.errors import ConfigError, ShoalError
from common.registry import RedisRegistry
from stack.gates import ask
from stack.service_rows import Row, rows_of
from stack.state_file import StackState, default_state_dir, find_stack

_ASK_TIMEOUT_S = 2.0
_PIPED_WIDTH = 200
_COLOURS = {"ready": "green", "reachable": "green", "degraded": "yellow"}
_WRAPPED = frozenset({"models", "load", "capacity"})


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
        registry = await RedisRegistry.connect(redis_url, _ASK_TIMEOUT_S, ServiceConfig.load([]).servers_ca_file)
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
    answered = bool(await ask(host, port, question, tls=parts.scheme == "rediss"))
    return Row(name, name, "reachable" if answered else "unreachable", answered, f"{host}:{port}")


def _print_table(rows: list[Row], stack: StackState | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    if stack is not None:
        console.print(f"{stack.url}  {stack.state}  (pid {stack.pid}, logs in {stack.log_dir})", highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("id", "state", "address", "models", "role", "transports", "load", "tiers", "capacity", "restarts"):
        table.add_column(column, no_wrap=column not in _WRAPPED)
    for row in rows:
        state = f"{row.state}: without {', '.join(row.lacks)}" if row.lacks and row.up else row.state
        table.add_row(row.service_id, f"[{_COLOURS.get(row.state, 'red')}]{state}[/]", row.address,
                      ", ".join(row.models), row.role, ", ".join(row.transports), _facts(row.load), _tiers(row),
                      _facts(row.capacity), str(row.restarts or ""))
    console.print(table)


def _tiers(row: Row) -> str:
    return ", ".join(f"{name} {seen.get('blocks', 0):g} blocks {_mib(seen.get('bytes', 0))}"
                     for name, seen in row.tiers.items())


def _facts(facts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_bytes')} {_mib(value)}" if name.endswith("_bytes") else f"{name} {value:g}"
                     for name, value in facts.items())


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
