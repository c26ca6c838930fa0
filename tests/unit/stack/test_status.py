from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from common.errors import NotFound
from stack import status
from stack.service_rows import Row


def test_servers_that_do_not_answer_are_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert not status.print_status(None, "redis://127.0.0.1:9/0", "nats://127.0.0.1:9", as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [(row["service"], row["up"]) for row in said["services"]] == [("redis", False), ("nats", False)]


def test_without_a_stack_there_is_nothing_to_report(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no stack runs here"):
        status.print_status(tmp_path, "", "", as_json=False)


def test_the_table_shows_role_transports_tiers_and_what_a_router_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        Row("decode", "mixed-0", "ready", True, "a:1", ("m",), "mixed", ("shm", "grpc"), load={"running": 2.0}),
        Row("kvstore", "kvstore-0", "ready", True, capacity={"dram_bytes": 1 << 21, "slots": 9},
            tiers={"dram": {"blocks": 12, "bytes": 3 << 19}}),
        Row("router", "router-0", "degraded", True, lacks=("nats",)),
    ]

    async def look(*_: object) -> list[Row]:
        await asyncio.sleep(0)
        return rows

    monkeypatch.setattr(status, "_look", look)
    assert status.print_status(None, "redis://r:1/0", "", as_json=False)
    head, worker, store, router = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "state", "address", "models", "role", "transports", "load", "tiers", "capacity",
                            "restarts"]
    assert worker.split() == ["mixed-0", "ready", "a:1", "m", "mixed", "shm,", "grpc", "running", "2"]
    assert store.split() == ["kvstore-0", "ready", "dram", "12", "blocks", "1.5", "MiB", "dram", "2.0", "MiB,",
                             "slots", "9"]
    assert "degraded: without nats" in router
