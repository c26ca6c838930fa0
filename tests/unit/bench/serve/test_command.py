"""The command as its users start it: a process of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

from tests.scripted_server import Json, Reply, scripted

DEADLINE_S = 60


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "stack", "bench", "serve", *arguments, "--model", "m", "--input-len", "4",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)


async def ended(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(DEADLINE_S):
        out, _ = await process.communicate()
    return out.decode()


async def good(_number: int, _body: Json, reply: Reply) -> None:
    await reply.open()
    await reply.text("a")
    await reply.text("b")
    await reply.end(2)


async def test_a_run_writes_its_tables_figures_result_and_picture(tmp_path: Path) -> None:
    names = {flag: tmp_path / flag for flag in ("json", "result", "plot")}
    async with scripted(good) as server:
        out = await ended(process := await started(
            server.url, "--num-prompts", "5", "--num-warmups", "2", "--max-concurrency", "2",
            "--goodput", "ttft:60000", "e2el:60000",
            "--save-detailed", *(part for flag, path in names.items() for part in (f"--{flag}", str(path)))))
    assert process.returncode == 0, out
    assert "5 of 5 requests completed" in out
    result = json.loads(names["result"].read_text())
    assert (result["completed"], result["total_output_tokens"], len(result["ttfts"])) == (5, 10, 5)
    assert result["request_goodput"] == result["request_throughput"]
    assert {"env", "figures"} == json.loads(names["json"].read_text()).keys()
    assert names["plot"].read_bytes().startswith(b"\x89PNG")
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 7, "warm-ups have prompts of their own"


async def test_ctrl_c_ends_a_run_with_the_results_so_far(tmp_path: Path) -> None:
    second = asyncio.Event()

    async def answer(number: int, body: Json, reply: Reply) -> None:
        if number == 0:
            await good(number, body, reply)
        else:
            second.set()
            await asyncio.sleep(DEADLINE_S)

    async with scripted(answer) as server:
        process = await started(
            server.url, "--num-prompts", "3", "--max-concurrency", "1", "--result", str(tmp_path / "r.json"))
        async with asyncio.timeout(DEADLINE_S):
            await second.wait()
        process.send_signal(signal.SIGINT)
        out = await ended(process)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    outcomes = json.loads((tmp_path / "r.json").read_text())["outcomes"]
    assert (outcomes["completed"], outcomes["interrupted"], outcomes["not sent"]) == (1, 1, 1)


async def test_a_run_of_which_nothing_completes_says_why_and_fails() -> None:
    async def refuse(_number: int, _body: Json, reply: Reply) -> None:
        await reply.whole(429, "too many")

    async with scripted(refuse) as server:
        out = await ended(process := await started(server.url, "--num-prompts", "3"))
    assert process.returncode == 1
    assert "3 refused (3 x 429)" in " ".join(out.split())
    assert "3 x 429: too many" in out
