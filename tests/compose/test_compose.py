"""compose.yaml from build to clean stop. The tests go in their order and share one stack: `make compose-test`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stack.smoke import smoke
from tests.compose.compose_stack import ROOT, SERVICES, ComposeStack, docker, image_bytes, inspect, name_of
from tests.compose.steady_load import SteadyLoad

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

_UP_TIMEOUT_S = 600.0
_ANSWERS_WITHIN_S = 600.0
_TWICE = {"tokenizer": 2, "router": 2, "prefill": 2, "decode": 2}
_IDLE_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    stack = ComposeStack(smollm2, tmp_path_factory.mktemp("compose") / "models")
    stack.build()
    try:
        stack.up({}, _UP_TIMEOUT_S)
        yield stack
        print(f"\nimage {image_bytes(stack.image) / 1e6:.0f} MB; seconds:",
              ", ".join(f"{what}: {seconds:.0f}" for what, seconds in stack.seconds.items()))
    except BaseException:
        print(stack.logs())
        raise
    finally:
        stack.down()


def test_the_stack_starts_and_the_smoke_test_passes_through_the_published_gateway(stack: ComposeStack) -> None:
    assert smoke(stack.url, "", None)


def test_only_the_gateway_is_published_and_only_on_loopback(stack: ComposeStack) -> None:
    for container in stack.containers():
        bound = [b for ports in inspect(container)["NetworkSettings"]["Ports"].values() for b in ports or ()]
        if container in stack.containers("gateway"):
            assert [b["HostIp"] for b in bound] == ["127.0.0.1"]
        else:
            assert bound == [], name_of(container)


def test_services_run_without_root_and_without_a_writable_root_file_system(stack: ComposeStack) -> None:
    for service in SERVICES:
        for container in stack.containers(service):
            seen = inspect(container)
            assert seen["Config"]["User"] == "10001:10001"
            assert seen["HostConfig"]["ReadonlyRootfs"]
            assert seen["HostConfig"]["CapDrop"] == ["ALL"]
            assert seen["HostConfig"]["Memory"] > 0, "no memory limit"


def test_kv_moves_over_shared_memory_and_never_over_the_network(stack: ComposeStack) -> None:
    with SteadyLoad(stack.url, stack.model) as load:
        load.wait_whole(6, _ANSWERS_WITHIN_S)
    assert load.seen.failures == []
    assert stack.total("decode", "shoal_kv_transfer_bytes_total", transport="shm") > 0
    assert stack.total("decode", "shoal_kv_transfer_bytes_total", transport="grpc") == 0
    assert stack.total("decode", "shoal_kv_transfer_fallbacks_total") == 0
    assert stack.total("prefill", "shoal_kv_sent_bytes_total") > 0
    assert stack.total("kvstore", "shoal_kvstore_blocks") > 0


def test_scaling_to_two_workers_of_each_kind_under_load_fails_no_request(stack: ComposeStack, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "stack", "bench", "serve", stack.url, "--num-prompts", "40", "--input-len", "200",
               "--output-len", "24", "--request-rate", "0.7", "--ignore-eos", "--temperature", "0",
               "--tokenizer", str(stack.model_folder), "--result", str(result)]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}) as bench:
        time.sleep(2)
        stack.up(_TWICE, _UP_TIMEOUT_S)
        assert bench.poll() is None, "the load ended before the scaling"
        assert bench.wait(600) == 0
    told = json.loads(result.read_text())
    assert (told["completed"], told["failed"]) == (40, 0)
    for service in ("decode", "prefill"):
        assert len(stack.containers(service)) == 2
    with SteadyLoad(stack.url, stack.model, num_clients=4) as load:
        load.wait_whole(16, _ANSWERS_WITHIN_S)
    assert load.seen.failures == []
    drawn = [sum(s.value for s in found if s.name == "shoal_generated_tokens_total")
             for found in stack.metrics_of_each("decode")]
    assert len(drawn) == 2
    assert all(drawn), f"one decode worker got no request: {drawn} tokens"


@pytest.mark.parametrize("service", ["tokenizer", "router", "prefill", "decode", "kvstore"])
def test_a_rolling_restart_fails_no_request(stack: ComposeStack, service: str) -> None:
    began = time.monotonic()
    with SteadyLoad(stack.url, stack.model) as load:
        load.wait_whole(2, _ANSWERS_WITHIN_S)
        for container in stack.containers(service):
            stack.restart(container, _UP_TIMEOUT_S)
            load.wait_whole(2, _ANSWERS_WITHIN_S)
    stack.seconds[f"rolling restart of {service} ({load.seen.num_whole} requests)"] = time.monotonic() - began
    assert load.seen.failures == []


def test_a_restart_of_the_only_gateway_cuts_no_stream_and_clients_that_try_again_lose_nothing(
    stack: ComposeStack
) -> None:
    began = time.monotonic()
    with SteadyLoad(stack.url, stack.model, retry_refused=True) as load:
        load.wait_whole(2, _ANSWERS_WITHIN_S)
        for container in stack.containers("gateway"):
            stack.restart(container, _UP_TIMEOUT_S)
        load.wait_whole(3, _ANSWERS_WITHIN_S)
    stack.seconds[f"restart of gateway ({load.seen.num_whole} requests)"] = time.monotonic() - began
    assert load.seen.failures == []
    assert load.seen.num_refused > 0, "no client met the gap: the test shows nothing"


def test_everything_stops_with_exit_code_0_and_leaves_no_block_and_no_file_behind(stack: ComposeStack) -> None:
    deadline = time.monotonic() + _IDLE_WITHIN_S
    while any(stack.total(service, "shoal_requests_running") for service in ("prefill", "decode")):
        assert time.monotonic() < deadline, "workers do not become idle"
        time.sleep(0.5)
    for service in ("prefill", "decode"):
        leaked = [s.value for s in stack.metrics(service) if s.name == "shoal_kv_leaked_blocks"]
        assert leaked == [0.0] * len(stack.containers(service))
    # The memory goes with its last container; this one keeps it, so that we can look.
    keeper = docker("run", "--detach", "--rm", "--volume", f"{stack.project}_shm:/shm", stack.image,
                    "sleep", "600").strip()
    try:
        assert docker("exec", keeper, "find", "/shm", "-mindepth", "1").split(), "the services do not meet here"
        stack.stop()
        codes = {name_of(c): inspect(c)["State"]["ExitCode"] for c in stack.containers()}
        left = docker("exec", keeper, "find", "/shm", "-mindepth", "1").split()
    finally:
        docker("rm", "--force", keeper)
    assert set(codes.values()) == {0}, codes
    assert left == []
