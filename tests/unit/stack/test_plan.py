from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from stack.child import ChildSpec, Gate, Ready
from stack.plan import StackOptions, service_specs

MODEL = Path("/models/Tiny-1M")


def gate(_service: str, _service_id: str) -> Gate:
    async def never(_spawned: float) -> Ready | None:
        return None

    return never


def planned(**changes: Any) -> dict[str, ChildSpec]:
    options = StackOptions(MODEL, Path("/state"), **changes)
    return {spec.name: spec for spec in service_specs(options, "nats://n:1", "redis://r:2/0", gate)}


def flag(spec: ChildSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_a_small_stack_is_one_of_each() -> None:
    assert list(planned()) == ["tokenizer-0", "decode-0", "gateway-0"]


def test_replicas_are_numbered_and_gateways_take_consecutive_ports() -> None:
    specs = planned(mixed=2, tokenizer=2, gateway=3, port=9000)
    assert list(specs) == ["tokenizer-0", "tokenizer-1", "decode-0", "decode-1", "gateway-0", "gateway-1", "gateway-2"]
    assert [flag(specs[f"gateway-{i}"], "--port") for i in range(3)] == ["9000", "9001", "9002"]
    assert flag(specs["decode-1"], "--port") == "0"


def test_workers_and_tokenizers_serve_the_model_under_its_folder_name() -> None:
    specs = planned()
    assert flag(specs["decode-0"], "--model-name") == "Tiny-1M"
    assert flag(specs["decode-0"], "--model-path") == str(MODEL)
    assert flag(specs["tokenizer-0"], "--models") == f"Tiny-1M={MODEL}"


def test_engine_flags_reach_the_workers_only() -> None:
    specs = planned(engine_flags={"max_num_seqs": "8"}, runner="mock-hash")
    assert flag(specs["decode-0"], "--max-num-seqs") == "8"
    assert flag(specs["decode-0"], "--runner") == "mock-hash"
    assert "--max-num-seqs" not in specs["gateway-0"].argv + specs["tokenizer-0"].argv


def test_urls_and_keys_are_passed_by_environment_not_on_the_command_line() -> None:
    specs = planned(api_key="sesame")
    assert specs["gateway-0"].env["SHOAL_GATEWAY_API_KEYS"] == "sesame"
    assert "SHOAL_GATEWAY_API_KEYS" not in specs["decode-0"].env
    assert specs["decode-0"].env["SHOAL_DECODE_REDIS_URL"] == "redis://r:2/0"
    for spec in specs.values():
        assert not any("sesame" in part or "://" in part for part in spec.argv)


def test_every_process_is_told_to_use_one_thread() -> None:
    assert {spec.env["OMP_NUM_THREADS"] for spec in planned().values()} == {"1"}


def test_gateways_stop_before_workers_and_workers_before_tokenizers() -> None:
    specs = planned()
    assert specs["gateway-0"].rank > specs["decode-0"].rank > specs["tokenizer-0"].rank > 0


def test_a_service_gets_its_whole_drain_limit_before_it_is_killed() -> None:
    specs = planned(drain_timeout_s=7)
    assert {flag(spec, "--drain-timeout-s") for spec in specs.values()} == {"7"}
    assert all(spec.stop_timeout_s > 7 for spec in specs.values())


@pytest.mark.parametrize(("changes", "named"), [
    ({"mixed": 0}, "--mixed must be 1 to 64, got 0"),
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
