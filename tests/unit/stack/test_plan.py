from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from stack.child import ChildSpec, Gate, Ready
from stack.gateway_tls import secured_gateway
from stack.plan import StackOptions, default_mixed, service_specs

MODEL = Path("/models/Tiny-1M")
SHM = Path("/dev/shm/own")


def gate(_service: str, _service_id: str) -> Gate:
    async def never(_spawned: float) -> Ready | None:
        return None

    return never


def planned(**changes: Any) -> dict[str, ChildSpec]:
    options = StackOptions(MODEL, Path("/state"), **changes)
    return {spec.name: spec for spec in service_specs(options, SHM, "nats://n:1", "redis://r:2/0", gate)}


def flag(spec: ChildSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_a_small_stack_is_one_mixed_worker_and_one_of_each_service() -> None:
    assert list(planned()) == ["tokenizer-0", "kvstore-0", "router-0", "mixed-0", "gateway-0"]


def test_replicas_are_numbered_by_role_and_gateways_take_consecutive_ports() -> None:
    specs = planned(prefill=2, decode=2, mixed=1, kvstore=2, router=2, tokenizer=2, gateway=3, port=9000)
    assert list(specs) == [
        "tokenizer-0", "tokenizer-1", "kvstore-0", "kvstore-1", "router-0", "router-1", "prefill-0", "prefill-1",
        "decode-0", "decode-1", "mixed-0", "gateway-0", "gateway-1", "gateway-2"]
    assert [flag(specs[f"gateway-{i}"], "--port") for i in range(3)] == ["9000", "9001", "9002"]
    assert flag(specs["decode-1"], "--port") == "0"
    assert flag(specs["decode-1"], "--service-id") == "decode-1"


def test_permission_for_plaintext_goes_to_every_service() -> None:
    assert not any("--insecure" in spec.argv for spec in planned().values())
    assert all("--insecure" in spec.argv for spec in planned(insecure=True).values())


@pytest.mark.parametrize(("host", "url"), [
    ("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("::", "http://[::1]:8000"),
    ("0.0.0.0", "http://127.0.0.1:8000")])
def test_the_url_is_one_that_a_client_can_use(host: str, url: str) -> None:
    assert StackOptions(MODEL, Path("/state"), host=host).url == url


def test_a_remote_server_in_plaintext_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="nats_url: nats://n speaks plaintext"):
        secured_gateway("127.0.0.1", (), nats_url="nats://n:1")
    with pytest.raises(ConfigError, match="redis_url: redis://r speaks plaintext"):
        secured_gateway("127.0.0.1", (), redis_url="redis://r:1")
    assert not secured_gateway("127.0.0.1", (), insecure=True, nats_url="nats://n:1", redis_url="redis://r:1")


@pytest.mark.parametrize(("prefill", "decode", "mixed"), [(0, 0, 1), (1, 0, 0), (0, 1, 0), (2, 3, 0)])
def test_a_stack_whose_roles_are_apart_has_a_mixed_worker_only_when_asked(
    prefill: int, decode: int, mixed: int,
) -> None:
    assert default_mixed(prefill, decode) == mixed


def test_decode_and_mixed_workers_are_one_service_in_two_roles() -> None:
    asked: list[tuple[str, str]] = []

    def note(service: str, service_id: str) -> Gate:
        asked.append((service, service_id))
        return gate(service, service_id)

    options = StackOptions(MODEL, Path("/state"), prefill=1, decode=1, mixed=1)
    specs = {s.name: s for s in service_specs(options, SHM, "nats://n:1", "redis://r:2/0", note)}
    assert [specs[name].argv[2] for name in ("prefill-0", "decode-0", "mixed-0", "kvstore-0", "router-0")] == [
        "prefill_svc", "decode_svc", "decode_svc", "kvstore_svc", "router_svc"]
    assert (flag(specs["decode-0"], "--role"), flag(specs["mixed-0"], "--role")) == ("decode", "mixed")
    assert "--role" not in specs["prefill-0"].argv
    assert {("prefill", "prefill-0"), ("decode", "decode-0"), ("decode", "mixed-0")} <= set(asked)
    assert specs["mixed-0"].env["SHOAL_DECODE_NATS_URL"] == "nats://n:1"


def test_workers_and_stores_share_one_folder_in_memory_and_each_store_has_its_own_file_on_disk() -> None:
    specs = planned(prefill=1, decode=1, mixed=1, kvstore=2, kvstore_dram_bytes=1 << 20, kvstore_ssd_bytes=1 << 21)
    assert {flag(specs[name], "--shm-dir") for name in ("prefill-0", "decode-0", "mixed-0", "kvstore-0", "kvstore-1")
            } == {str(SHM)}
    assert [flag(specs[f"kvstore-{i}"], "--ssd-path") for i in range(2)] == [
        "/state/kvstore-0.ssd", "/state/kvstore-1.ssd"]
    assert flag(specs["kvstore-0"], "--dram-bytes") == str(1 << 20)
    assert flag(specs["kvstore-0"], "--ssd-bytes") == str(1 << 21)


def test_a_forced_transport_is_told_to_whoever_receives_the_kv() -> None:
    specs = planned(prefill=1, decode=1, mixed=1, transport="grpc")
    assert flag(specs["decode-0"], "--transport") == flag(specs["mixed-0"], "--transport") == "grpc"
    assert "--transport" not in specs["prefill-0"].argv + planned()["mixed-0"].argv


def test_workers_and_tokenizers_serve_the_model_under_its_folder_name() -> None:
    specs = planned()
    assert flag(specs["mixed-0"], "--model-name") == "Tiny-1M"
    assert flag(specs["mixed-0"], "--model-path") == str(MODEL)
    assert flag(specs["tokenizer-0"], "--models") == f"Tiny-1M={MODEL}"


def test_engine_flags_reach_the_workers_only() -> None:
    specs = planned(prefill=1, decode=1, mixed=1, engine_flags={"max_num_seqs": "8"}, runner="mock-hash")
    for name in ("prefill-0", "decode-0", "mixed-0"):
        assert flag(specs[name], "--max-num-seqs") == "8"
        assert flag(specs[name], "--runner") == "mock-hash"
    others = [part for name, spec in specs.items() if name.startswith(("gateway", "tokenizer", "kvstore", "router"))
              for part in spec.argv]
    assert "--max-num-seqs" not in others


def test_each_worker_has_a_gpu_of_its_own_where_no_index_was_asked_for() -> None:
    specs = planned(decode=2, mixed=2, engine_flags={"device": "cuda"})
    assert [flag(specs[name], "--device") for name in ("decode-0", "decode-1", "mixed-0", "mixed-1")] == [
        "cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    specs = planned(mixed=2, engine_flags={"device": "cuda:1"})
    assert [flag(specs[name], "--device") for name in ("mixed-0", "mixed-1")] == ["cuda:1", "cuda:1"]


def test_a_prefill_worker_on_a_gpu_is_refused_for_its_kv_cannot_leave_it() -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        planned(prefill=1, decode=1, engine_flags={"device": "cuda:0"})


def test_urls_and_keys_are_passed_by_environment_not_on_the_command_line() -> None:
    specs = planned(api_key="sesame")
    assert specs["gateway-0"].env["SHOAL_GATEWAY_API_KEYS"] == "sesame"
    assert "SHOAL_GATEWAY_API_KEYS" not in specs["mixed-0"].env
    assert specs["mixed-0"].env["SHOAL_DECODE_REDIS_URL"] == "redis://r:2/0"
    for spec in specs.values():
        assert not any("sesame" in part or "://" in part for part in spec.argv)


def test_every_process_is_told_to_use_one_thread() -> None:
    assert {spec.env["OMP_NUM_THREADS"] for spec in planned().values()} == {"1"}


def test_each_stops_before_those_that_it_needs() -> None:
    rank = {name.rsplit("-", 1)[0]: spec.rank for name, spec in planned(prefill=1, decode=1, mixed=1).items()}
    assert rank["gateway"] > rank["decode"] == rank["mixed"] > rank["prefill"]
    assert rank["prefill"] > rank["kvstore"] == rank["router"] == rank["tokenizer"] > 0


def test_a_service_gets_its_whole_drain_limit_before_it_is_killed() -> None:
    specs = planned(drain_timeout_s=7)
    assert {flag(spec, "--drain-timeout-s") for spec in specs.values()} == {"7"}
    assert all(spec.stop_timeout_s > 7 for spec in specs.values())


@pytest.mark.parametrize(("changes", "named"), [
    ({"mixed": 65}, "--mixed must be 0 to 64, got 65"),
    ({"mixed": 0}, "nobody would decode: --decode or --mixed must be at least 1"),
    ({"mixed": 0, "prefill": 2}, "nobody would decode: --decode or --mixed must be at least 1"),
    ({"tokenizer": 0}, "--tokenizer must be 1 to 64, got 0"),
    ({"transport": "rdma"}, "--transport must be one of auto, shm, grpc; got 'rdma'"),
    ({"gateway": 65}, "--gateway must be 1 to 64, got 65"),
    ({"port": 65535, "gateway": 2}, "goes beyond 65535"),
    ({"runner": "cuda"}, "--runner must be one of torch, mock-echo, mock-hash; got 'cuda'"),
])
def test_a_wrong_option_is_named_with_its_limit(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        StackOptions(MODEL, Path("/state"), **changes)


@pytest.mark.parametrize(("host", "url"), [
    ("127.0.0.1", "http://127.0.0.1:8000"), ("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"),
])
def test_the_url_is_one_that_a_client_on_this_machine_can_use(host: str, url: str) -> None:
    assert StackOptions(MODEL, Path("/state"), host=host).url == url
