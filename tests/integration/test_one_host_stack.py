"""`shoal up` with real services and a mock model: what the supervisor promises, seen from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import psutil
import pytest

from stack.stack_process import StackProcess
from tests.stack import RunningStack, wait_gone

WAIT_S = 30.0


def completion(stack: RunningStack) -> httpx2.Response:
    body = {"model": stack.model, "prompt": "hello there", "max_tokens": 3}
    return httpx2.post(f"{stack.url}/v1/completions", json=body, timeout=WAIT_S)


def none_alive(processes: list[psutil.Process]) -> bool:
    return not wait_gone(processes, WAIT_S)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(tmp_path_factory.mktemp("one-host"), prefill=1, decode=1, mixed=1) as made:
        yield made


def shoal(stack: RunningStack, *argv: str) -> subprocess.CompletedProcess[str]:
    folder = str(stack.process.state_dir)
    return subprocess.run([sys.executable, "-m", "stack", *argv, "--state-dir", folder],
                          capture_output=True, text=True, check=False, timeout=WAIT_S)


def test_the_stack_answers_and_its_workers_count_it(stack: RunningStack) -> None:
    def generated() -> float:
        return sum(stack.metrics(name)["shoal_generated_tokens_total"] for name in ("decode-0", "mixed-0"))

    before = generated()
    assert completion(stack).json()["usage"]["completion_tokens"] == 3
    assert generated() >= before + 3


@pytest.mark.parametrize("name", [
    "nats", "valkey", "tokenizer-0", "kvstore-0", "router-0", "prefill-0", "decode-0", "mixed-0", "gateway-0"])
def test_what_is_killed_comes_back_and_requests_work(stack: RunningStack, name: str) -> None:
    before = stack.service(name)
    stack.kill(name)
    after = stack.wait_healed(name)
    assert after.pid != before.pid
    if name in ("nats", "valkey", "gateway-0"):
        assert after.address == before.address  # others find them where they were
    else:
        assert after.incarnation != before.incarnation
    assert completion(stack).status_code == 200
    assert f"{name} was killed by SIGKILL" in stack.process.printed()


def test_status_lists_every_service_as_up(stack: RunningStack) -> None:
    done = shoal(stack, "status", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["services"]
    assert {row["service_id"]: row["role"] for row in rows} == {
        "redis": "", "nats": "", "tokenizer-0": "", "kvstore-0": "", "router-0": "", "gateway-0": "",
        "prefill-0": "prefill", "decode-0": "decode", "mixed-0": "mixed"}
    assert all(row["up"] for row in rows)
    by_id = {row["service_id"]: row for row in rows}
    assert by_id["decode-0"]["transports"] == by_id["prefill-0"]["transports"] == ["shm", "grpc"]
    assert set(by_id["kvstore-0"]["tiers"]) == {"dram", "ssd"}
    assert "index blocks" in by_id["router-0"]["load"]


def test_status_fails_while_a_worker_is_stopped(stack: RunningStack) -> None:
    worker = psutil.Process(stack.pid_of("mixed-0"))
    worker.suspend()
    try:
        done = shoal(stack, "status", "--json")
    finally:
        worker.resume()
    assert done.returncode == 1
    assert [row["service_id"] for row in json.loads(done.stdout)["services"] if not row["up"]] == ["mixed-0"]


def test_chat_reads_plain_input_and_reports_each_turn(stack: RunningStack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stack", "chat", "--url", stack.url], capture_output=True, text=True, check=True,
        input="/stats\n/quit\nnever asked\n", timeout=WAIT_S)
    assert "0 answers" in done.stdout
    assert "never asked" not in done.stdout


def test_a_second_stack_on_the_same_port_or_folder_is_refused(stack: RunningStack, tmp_path: Path) -> None:
    taken = shoal(stack, "up", "--port", "0")
    assert (taken.returncode, len(taken.stderr.splitlines())) == (2, 1)
    assert f"runs already at {stack.url}" in taken.stderr
    port = stack.url.rsplit(":", 1)[1]
    taken = subprocess.run([sys.executable, "-m", "stack", "up", "--port", port, "--state-dir", str(tmp_path)],
                           capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (taken.returncode, len(taken.stderr.splitlines())) == (2, 1)
    assert f"port {port} on 127.0.0.1 is taken" in taken.stderr


def test_a_killed_supervisor_leaves_nothing_and_the_folder_can_be_used_again(tmp_path: Path) -> None:
    stack = RunningStack(tmp_path)
    with stack:
        children = psutil.Process(stack.process.pid).children(recursive=True)
        assert len(children) >= 7
        memory = Path(stack.state.shm_dir)
        psutil.Process(stack.process.pid).kill()
        assert none_alive(children)
        assert stack.process.stop() == -signal.SIGKILL
    left = {path.name: path.stat().st_ino for path in memory.iterdir()}
    assert left, "files of the killed are there"
    with RunningStack(tmp_path) as again:
        assert completion(again).status_code == 200
        assert Path(again.state.shm_dir) == memory
        assert not left.items() & {path.name: path.stat().st_ino for path in memory.iterdir()}.items()
    assert not memory.exists()


def test_two_stacks_do_not_share_memory(stack: RunningStack, tmp_path: Path) -> None:
    with RunningStack(tmp_path, router=0, kvstore=0) as other:
        assert other.state.shm_dir != stack.state.shm_dir
        assert Path(stack.state.shm_dir).is_dir()
    assert Path(stack.state.shm_dir).is_dir()


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    slow = {"SHOAL_DECODE_MOCK_STEP_S": "0.05"}
    with RunningStack(tmp_path, env=slow, drain_timeout_s=600) as stack:
        children = psutil.Process(stack.process.pid).children(recursive=True)
        supervisor = psutil.Process(stack.process.pid)
        body = {"model": stack.model, "prompt": "x", "max_tokens": 4000, "stream": True}
        with httpx2.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=WAIT_S) as answer:
            assert next(answer.iter_lines())
            supervisor.send_signal(signal.SIGINT)
            deadline = time.monotonic() + WAIT_S
            while stack.state.state != "stopping":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert supervisor.is_running()
            supervisor.send_signal(signal.SIGINT)
            assert none_alive([supervisor, *children])


def test_a_broken_model_folder_ends_the_start_with_the_workers_own_words(tmp_path: Path) -> None:
    broken = tmp_path / "Broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["MysteryForCausalLM"]}')
    process = StackProcess(tmp_path / "state", ["--model", str(broken)])
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 2 * WAIT_S
    while process.returncode is None and time.monotonic() < deadline:
        children += psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.05)
    assert process.returncode in (1, 2)
    assert "while starting; its last lines" in process.printed()
    assert none_alive(list(set(children)))


def test_an_unreachable_redis_ends_the_start_and_is_named(tmp_path: Path) -> None:
    process = StackProcess(tmp_path / "state", ["--redis-url", "redis://user:sesame@127.0.0.1:9/0"],
                           {"SHOAL_CONNECT_TIMEOUT_S": "1", "SHOAL_GATEWAY_CONNECT_TIMEOUT_S": "1"})
    deadline = time.monotonic() + 2 * WAIT_S
    while process.returncode is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.returncode == 1
    assert "Redis at 127.0.0.1:9/0 is not reachable within 1 s" in process.printed()
    assert "sesame" not in process.printed()
