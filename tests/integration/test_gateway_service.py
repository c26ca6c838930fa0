"""The gateway as a process, with real NATS and Valkey."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process

import httpx2

from common.registry import RedisRegistry
from stack.ports import free_port
from tests.servers import RealServer


async def start_gateway(nats: RealServer, valkey: RealServer, *flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--nats-url", nats.url, "--redis-url", valkey.url, *flags,
        stderr=PIPE, stdout=PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})


async def test_a_gateway_serves_registers_drains_on_sigterm_and_leaves(nats: RealServer, valkey: RealServer) -> None:
    port = free_port("127.0.0.1")
    process = await start_gateway(nats, valkey, "--port", str(port), "--service-id", "gateway-0")
    registry = await RedisRegistry.connect(valkey.url, 5)
    try:
        async with asyncio.timeout(30):
            while not (records := await registry.list()):
                await asyncio.sleep(0.1)
        assert [(r.service, r.service_id, r.address) for r in records] == [
            ("gateway", "gateway-0", f"127.0.0.1:{port}")]
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/ready")).status_code == 503  # there is no worker
            assert (await client.get("/v1/models")).json() == {"object": "list", "data": []}
            scraped = await client.get(f"http://{records[0].metrics_address}/metrics")
            assert "shoal_gateway_requests_total" in scraped.text
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert await registry.list() == []
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await registry.close()


async def test_a_port_that_is_taken_is_one_clear_line_and_a_failed_start(nats: RealServer, valkey: RealServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start_gateway(nats, valkey, "--port", str(port))
        _out, err = await asyncio.wait_for(process.communicate(), 30)
    lines = [line for line in err.decode().splitlines() if not line.startswith("{")]
    assert process.returncode not in (0, None)
    assert len(lines) == 1, lines
    assert str(port) in lines[0]
