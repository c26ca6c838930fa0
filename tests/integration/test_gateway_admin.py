"""The gateway as a process: its key file changes while it runs, and the admin port is its own."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import httpx2
import pytest

from stack.ports import free_port
from tests.servers import RealServer

TOKEN = "admin-token-of-this-test"


async def start_gateway(nats: RealServer, valkey: RealServer, *flags: str, token: str = TOKEN) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--nats-url", nats.url, "--redis-url", valkey.url, *flags,
        stderr=PIPE, stdout=PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "SHOAL_GATEWAY_ADMIN_TOKEN": token})


async def status(url: str, key: str) -> int:
    """0 while nobody listens."""
    try:
        async with httpx2.AsyncClient() as client:
            return (await client.get(url, headers={"authorization": f"Bearer {key}"})).status_code
    except httpx2.TransportError:
        return 0


async def until_status(url: str, key: str, wanted: int) -> None:
    async with asyncio.timeout(30):
        while await status(url, key) != wanted:
            await asyncio.sleep(0.05)


async def test_a_sighup_brings_the_new_keys_and_the_admin_port_has_its_own_token(
    nats: RealServer, valkey: RealServer, tmp_path: Path
) -> None:
    port, admin_port, file = free_port("127.0.0.1"), free_port("127.0.0.1"), tmp_path / "keys"
    file.write_text("first-key\n")
    process = await start_gateway(
        nats, valkey, "--port", str(port), "--admin-port", str(admin_port), "--api-key-file", str(file),
        "--api-key-reload-s", "3600")
    public, admin = f"http://127.0.0.1:{port}/v1/models", f"http://127.0.0.1:{admin_port}/keys"
    try:
        await until_status(admin, TOKEN, 200)
        await until_status(public, "first-key", 200)
        assert await status(public, TOKEN) == 401
        assert await status(admin, "first-key") == 403
        file.write_text(f"sha256:{hashlib.sha256(b'second-key').hexdigest()} tenant=acme\n")
        assert await status(public, "second-key") == 401
        process.send_signal(signal.SIGHUP)
        await until_status(public, "second-key", 200)
        assert await status(public, "first-key") == 401
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        out, err = await process.communicate()
    assert TOKEN.encode() not in out + err
    assert b"second-key" not in out + err


@pytest.mark.parametrize(("flags", "token", "named"), [
    (["--admin-port", "9"], "", "admin_token"), (["--admin-port", "9", "--admin-host", "0.0.0.0"], TOKEN, "admin_host"),
    ([], "short", "admin_token")])
async def test_an_admin_port_that_nobody_or_everybody_could_use_stops_the_start(
    nats: RealServer, valkey: RealServer, flags: list[str], token: str, named: str
) -> None:
    process = await start_gateway(nats, valkey, "--port", "0", *flags, token=token)
    _out, err = await asyncio.wait_for(process.communicate(), 30)
    lines = [line for line in err.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 2
    assert len(lines) == 1, lines
    assert named in lines[0]
    assert "short" not in lines[0]
