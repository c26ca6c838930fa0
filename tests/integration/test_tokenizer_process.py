"""The tokenizer as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from common.clients.tokenizer import TokenizerClient
from common.directory import Directory
from common.registry import RedisRegistry
from tests.integration.tokenizer_fleet import TEXT, one_by_one
from tests.servers import RealServer
from tests.unit.common.text import folders


async def spawn(folder: Path, nats: RealServer, valkey: RealServer) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenizer_svc", "--models", f"m={folder}", "--nats-url", nats.url,
        "--redis-url", valkey.url, "--lease-ttl-s", "2", stderr=asyncio.subprocess.DEVNULL)


async def test_a_sigkilled_process_that_starts_again_is_never_noticed_and_sigterm_ends_it_with_0(
    tmp_path: Path, nats: RealServer, valkey: RealServer
) -> None:
    folder = folders.write_folder(tmp_path / "model")
    registry = await RedisRegistry.connect(valkey.url, 10)
    directory = Directory(registry, poll_s=0.1)
    await directory.start()
    client = TokenizerClient(directory)
    process = await spawn(folder, nats, valkey)
    try:
        ids = (await client.tokenize_text("m", TEXT, add_special_tokens=False)).token_ids
        stream = client.open_text("m")
        text = await one_by_one(stream, ids[:25])
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        going_on = asyncio.create_task(one_by_one(stream, ids[25:]))
        calling = asyncio.create_task(client.decode("m", ids))
        process = await spawn(folder, nats, valkey)
        text += await going_on + (await stream.finish()).text
        assert text == await calling == TEXT
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert not [r for r in await registry.list() if r.state == "draining"]  # its record went with it
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await client.stop()
        await directory.stop()
        await registry.close()
