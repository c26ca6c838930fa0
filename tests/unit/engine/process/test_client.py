"""The engine in its own process, with the mock runner: answers, shared KV bytes, faults."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.errors import InternalError, InvalidRequest, ModelLoadError, Unavailable, WorkerLost
from common.kv_event import BlockStored, KvEvent
from common.sampling_params import SamplingParams
from engine.engine_port import Fetch
from engine.mock_runner import hashed_token
from engine.outputs import FinishReason, RequestOutput
from engine.process import child, client, life_signs, messages
from engine.process.client import EngineProcess
from engine.request import EngineRequest
from engine.worker_config import WorkerConfig
from tests.factories import tiny_llama

PROMPT = tuple(range(3, 43))


class Heard:
    """A listener."""

    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.events: list[KvEvent] = []
        self.fetches: list[Fetch] = []
        self.failures: list[str] = []

    def on_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        self.outputs.extend(outputs)

    def on_kv_events(self, events: Sequence[KvEvent]) -> None:
        self.events.extend(events)

    def on_fetches(self, fetches: Sequence[Fetch]) -> None:
        self.fetches.extend(fetches)

    def on_failed(self, why: str) -> None:
        self.failures.append(why)

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs if output.request_id == request_id for t in output.new_token_ids]

    def last(self, request_id: str) -> RequestOutput | None:
        ended = [o for o in self.outputs if o.request_id == request_id and o.finish_reason is not None]
        assert len(ended) < 2, f"{request_id} ended more than once"
        return ended[0] if ended else None


async def until(met: Callable[[], Any], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def config(folder: Path, **fields: Any) -> WorkerConfig:
    return WorkerConfig(**{
        "model_path": str(folder), "runner": "mock-hash", "num_blocks": 64, "max_model_len": 512, "service_id": "w0",
        "log_level": "error", **fields})


def ask(request_id: str, max_tokens: int = 8, **fields: Any) -> EngineRequest:
    return EngineRequest(request_id, PROMPT, SamplingParams(max_tokens=max_tokens), **fields)


def oracle(num_tokens: int) -> list[int]:
    known = list(PROMPT)
    for _ in range(num_tokens):
        known.append(hashed_token(known, 256, frozenset({2})))
    return known[len(PROMPT):]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[tuple[EngineProcess, Heard]]:
    heard = Heard()
    process = EngineProcess(config(folder, mock_step_s=0.002), "tiny", b"k" * 32, heard)
    await process.start()
    yield process, heard
    await process.stop()
    assert not psutil.pid_exists(process.pid)


async def test_a_request_gets_its_tokens_and_its_blocks_are_told(engine: tuple[EngineProcess, Heard]) -> None:
    process, heard = engine
    process.submit(ask("a"))
    process.submit(ask("b", max_tokens=3))
    await until(lambda: heard.last("a") and heard.last("b"))
    assert (heard.tokens("a"), heard.tokens("b")) == (oracle(8), oracle(3))
    await until(lambda: any(isinstance(event, BlockStored) for event in heard.events))
    await until(lambda: process.stats.num_finished[FinishReason.LENGTH] == 2)
    assert process.facts.capacity["num_blocks"] == 64


async def test_bytes_written_here_are_read_there(engine: tuple[EngineProcess, Heard]) -> None:
    process, heard = engine
    reserved = await process.reserve(ask("r"))
    for index, block_id in enumerate(reserved.block_ids):  # the mock runner's KV is the token ids
        slots, size = process.block_view(block_id).cast("i"), process.facts.fingerprint.block_size
        part = PROMPT[index * size : (index + 1) * size]
        slots[: len(part)] = memoryview(b"".join(t.to_bytes(4, "little") for t in part)).cast("i")
    await process.land("r", len(PROMPT) - 1)
    await process.start_reserved("r", num_cached_tokens=len(PROMPT) - 1)
    await until(lambda: heard.last("r"))
    assert heard.tokens("r") == oracle(8)
    assert heard.outputs[0].num_cached_tokens == len(PROMPT) - 1


async def test_errors_of_calls_keep_their_type_and_facts(engine: tuple[EngineProcess, Heard]) -> None:
    process, heard = engine
    with pytest.raises(InvalidRequest, match="'nobody' is not AWAITING_KV") as caught:
        await process.land("nobody", 3)
    assert caught.value.param == "request_id"
    with pytest.raises(Exception, match="without a pin"):
        await process.unpin([1])
    process.submit(EngineRequest("bad", (999,), SamplingParams(max_tokens=1)))
    await until(lambda: heard.last("bad"))
    assert isinstance(heard.outputs[-1].error, InvalidRequest)
    process.submit(ask("twice", max_tokens=200))
    with pytest.raises(InvalidRequest, match="in use by a live request"):
        process.submit(ask("twice"))
    process.abort("twice")
    await until(lambda: heard.last("twice"))
    assert heard.last("twice").finish_reason is FinishReason.ABORT  # type: ignore[union-attr]


async def test_a_request_of_a_wrong_type_is_refused_alone(engine: tuple[EngineProcess, Heard]) -> None:
    process, heard = engine
    process.submit(ask("fine"))
    process.submit(EngineRequest("odd", (True, 5), SamplingParams(max_tokens=1)))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        await process.reserve(EngineRequest("odd too", (5, "6"), SamplingParams(max_tokens=1)))  # type: ignore[arg-type]
    for odd in (2**70, object(), "\ud800"):
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            process.submit(EngineRequest("odder", (5, odd), SamplingParams(max_tokens=1)))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await process.reserve(EngineRequest("odder", (5, odd), SamplingParams(max_tokens=1)))  # type: ignore[arg-type]
    await until(lambda: heard.last("fine") and heard.last("odd"))
    assert heard.tokens("fine") == oracle(8)
    assert isinstance(heard.last("odd").error, InvalidRequest)  # type: ignore[union-attr]
    assert (process._live, process._reserved, heard.failures) == ({}, {}, [])


async def test_a_refused_reservation_leaves_no_trace_and_does_not_touch_that_of_its_id(
    engine: tuple[EngineProcess, Heard]
) -> None:
    process, heard = engine
    with pytest.raises(InvalidRequest):
        await process.reserve(EngineRequest("bad", (9999,), SamplingParams(max_tokens=4)))
    assert process._reserved == {}
    await process.reserve(EngineRequest("r", PROMPT, SamplingParams(max_tokens=3, n=2)))
    with pytest.raises(InvalidRequest, match="in use by a live request"):
        await process.reserve(ask("r"))
    assert process._reserved == {"r": 2}
    await process.start_reserved("r", num_cached_tokens=0)
    await until(lambda: len([o for o in heard.outputs if o.finish_reason is not None]) == 2)
    assert (process._live, process._reserved) == ({}, {})


async def test_commands_that_cannot_be_read_end_the_engine_with_the_reason(folder: Path) -> None:
    heard = Heard()
    process = EngineProcess(config(folder, mock_step_s=0.01), "tiny", b"k" * 32, heard)
    await process.start()
    process.submit(ask("left", max_tokens=400))
    await until(lambda: heard.tokens("left"))
    process.abort(5)  # type: ignore[arg-type]
    await until(lambda: heard.failures)
    assert "cannot read its commands: Expected `str`, got `int`" in heard.failures[0]
    assert heard.last("left").finish_reason is FinishReason.ERROR  # type: ignore[union-attr]
    await process.stop()


async def test_a_killed_engine_answers_everyone_and_is_reported(folder: Path) -> None:
    heard = Heard()
    process = EngineProcess(config(folder, mock_step_s=0.01), "tiny", b"k" * 32, heard)
    await process.start()
    process.submit(ask("runs", max_tokens=400))
    await until(lambda: heard.tokens("runs"))
    os.kill(process.pid, signal.SIGSTOP)  # nothing is answered any more
    waiting = asyncio.create_task(process.pin([b"x" * 16]))
    await asyncio.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: heard.failures)
    assert "signal 9" in heard.failures[0]
    assert isinstance(heard.last("runs").error, WorkerLost)  # type: ignore[union-attr]
    with pytest.raises(Unavailable, match="signal 9"):
        await waiting
    with pytest.raises(Unavailable, match="signal 9"):
        process.submit(ask("late"))
    with pytest.raises(Unavailable, match="signal 9"):
        await process.land("x", 1)
    await process.stop()


async def test_a_step_that_fails_ends_the_process_after_all_are_answered(folder: Path) -> None:
    heard = Heard()
    process = EngineProcess(config(folder), "tiny", b"k" * 32, heard)
    await process.start()
    reserved = await process.reserve(ask("r"))
    await process.land("r", len(PROMPT) - 1)  # nothing was written: the mock runner finds that out
    await process.start_reserved("r")
    await until(lambda: heard.failures)
    assert "never written" in heard.failures[0]
    assert heard.last("r").finish_reason is FinishReason.ERROR  # type: ignore[union-attr]
    assert len(reserved.block_ids) == 3
    await process.stop()
    assert not psutil.pid_exists(process.pid)


async def test_stopping_answers_what_lives(folder: Path) -> None:
    heard = Heard()
    process = EngineProcess(config(folder, mock_step_s=0.01), "tiny", b"k" * 32, heard)
    await process.start()
    process.submit(ask("left", max_tokens=400))
    await until(lambda: heard.tokens("left"))
    await process.stop()
    assert isinstance(heard.last("left").error, Unavailable)  # type: ignore[union-attr]
    assert heard.failures == []


async def test_a_model_that_does_not_load_says_why(folder: Path, tmp_path: Path) -> None:
    process = EngineProcess(config(tmp_path / "absent"), "tiny", b"k" * 32, Heard())
    with pytest.raises(ModelLoadError, match="absent"):
        await process.start()
    assert not psutil.pid_exists(process.pid)


def test_the_engine_does_not_outlive_its_worker(folder: Path) -> None:
    script = (
        "import asyncio, sys, os; from tests.unit.engine.process.test_client import *\n"
        "async def main():\n"
        f"    p = EngineProcess(config(__import__('pathlib').Path({str(folder)!r})), 'tiny', b'k' * 32, Heard())\n"
        "    await p.start(); print(p.pid, flush=True); os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    pid = int(ran.stdout)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine process is still there"
        time.sleep(0.05)


async def test_a_process_that_is_silent_while_it_starts_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STALL_S", 0.2)
    monkeypatch.setattr(client, "EXIT_S", 0.2)
    process = EngineProcess(config(folder), "tiny", b"k" * 32, Heard())
    starting = asyncio.create_task(process.start())
    await until(lambda: process._process)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(InternalError, match=r"silent for 0\.2 s"):
        await starting
    assert not psutil.pid_exists(process.pid)


async def test_a_start_that_is_cancelled_in_the_fork_leaves_no_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, made = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def slow(*args: Any, **fields: Any) -> subprocess.Popen[bytes]:
        time.sleep(0.2)
        made.append(popen(*args, **fields))
        return made[0]

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(client, "EXIT_S", 30.0)
    starting = asyncio.create_task(EngineProcess(config(folder), "tiny", b"k" * 32, Heard()).start())
    for _ in range(2):
        await asyncio.sleep(0.05)
        starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [process.returncode for process in made] == [1]  # it saw the end of its stream, and was waited for


class _Exited(Exception):
    """In the place of the process's end."""


@pytest.fixture
def reset_worker(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The child's end of a stream whose other end is gone with something unread."""

    def exited(code: int) -> None:
        raise _Exited

    monkeypatch.setattr(os, "_exit", exited)
    ours, worker = socket.socketpair()
    worker.sendall(b"unread")
    ours.close()
    return worker


@pytest.mark.parametrize("watch", [
    child._end_with, lambda worker: child._Inbox(worker).next(), lambda worker: life_signs.LifeSigns(worker)._run()],
    ids=["loading", "serving", "telling"])
def test_a_worker_that_is_gone_with_messages_unread_ends_the_process(
    reset_worker: socket.socket, monkeypatch: pytest.MonkeyPatch, watch: Callable[[socket.socket], object]
) -> None:
    monkeypatch.setattr(life_signs, "EVERY_S", 0.01)
    with reset_worker, pytest.raises(_Exited):
        watch(reset_worker)


def test_signs_of_life_go_out_also_without_progress_and_end_with_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_signs, "EVERY_S", 0.01)
    ours, worker = socket.socketpair()
    with ours, worker, ours.makefile("rb") as stream:
        def read() -> messages.Message:
            (size,) = messages.LENGTH.unpack(stream.read(messages.LENGTH.size))
            return messages.message_decoder.decode(stream.read(size))

        signs = life_signs.LifeSigns(worker)
        signs.start()
        assert [read(), read()] == [messages.Loading(0, 0)] * 2
        signs.progress(3, 7)
        while read() != messages.Loading(3, 7):
            pass
        signs.stop()
        worker.shutdown(socket.SHUT_WR)
        while head := stream.read(messages.LENGTH.size):
            stream.read(messages.LENGTH.unpack(head)[0])
