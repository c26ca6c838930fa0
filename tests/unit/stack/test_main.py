from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stack import up
from stack.__main__ import app
from stack.plan import StackOptions


def shoal(*argv: str) -> Result:
    return CliRunner().invoke(app, argv)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[StackOptions]:
    """The options of each `up` that would have run."""
    calls: list[StackOptions] = []

    def record(options: StackOptions, _console: Any) -> None:
        calls.append(options)

    monkeypatch.setattr(up, "up", record)
    return calls


def test_up_turns_flags_into_options(ran: list[StackOptions], model: Path, tmp_path: Path) -> None:
    result = shoal("up", "--model", str(model), "--mixed", "2", "--port", "8123", "--state-dir", str(tmp_path / "s"),
                   "--max-num-seqs", "8", "--dtype", "float32", "--runner", "mock-echo")
    assert result.exit_code == 0, result.output
    (options,) = ran
    assert (options.mixed, options.port, options.runner, options.model_name) == (2, 8123, "mock-echo", "Tiny")
    assert options.engine_flags == {"max_num_seqs": "8", "dtype": "float32"}


def test_port_zero_takes_a_free_one(ran: list[StackOptions], model: Path) -> None:
    assert shoal("up", "--model", str(model), "--port", "0").exit_code == 0
    assert ran[0].port > 0


def test_roles_apart_leave_out_the_mixed_worker_unless_it_is_asked_for(
    ran: list[StackOptions], model: Path,
) -> None:
    for argv in ([], ["--prefill", "1", "--decode", "2"], ["--decode", "2", "--mixed", "1"]):
        assert shoal("up", "--model", str(model), "--port", "0", *argv).exit_code == 0
    assert [(o.prefill, o.decode, o.mixed, o.kvstore, o.router) for o in ran] == [
        (0, 0, 1, 1, 1), (1, 2, 0, 1, 1), (0, 2, 1, 1, 1)]


def test_flags_of_hand_off_and_store_become_options(ran: list[StackOptions], model: Path) -> None:
    result = shoal("up", "--model", str(model), "--port", "0", "--transport", "grpc", "--store-policy", "none",
                   "--kvstore", "2", "--kvstore-dram-bytes", "1048576", "--kvstore-ssd-bytes", "2097152")
    assert result.exit_code == 0, result.output
    (options,) = ran
    assert (options.transport, options.engine_flags) == ("grpc", {"store_policy": "none"})
    assert (options.kvstore, options.kvstore_dram_bytes, options.kvstore_ssd_bytes) == (2, 1 << 20, 1 << 21)


@pytest.mark.parametrize(("argv", "said"), [
    (["--model", "/no/such/folder"], "'/no/such/folder' is neither a folder nor a known name"),
    (["--mixed", "0"], "--decode or --mixed must be at least 1"),
    (["--prefill", "1"], "--decode or --mixed must be at least 1"),
    (["--log-format", "xml"], "--log-format must be console or json, got 'xml'"),
])
def test_a_wrong_option_ends_with_one_line_and_exit_code_2(
    ran: list[StackOptions], model: Path, argv: list[str], said: str,
) -> None:
    argv = argv if "--model" in argv else ["--model", str(model), *argv]
    result = shoal("up", *argv)
    assert result.exit_code == 2
    assert result.stderr.startswith("shoal: ")
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not ran


def test_a_taken_port_ends_with_one_line_before_anything_starts(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = shoal("up", "--model", str(model), "--port", str(port), "--state-dir", str(tmp_path / "s"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert f"port {port} on 127.0.0.1 is taken" in result.stderr
    assert not (tmp_path / "s" / "logs").exists()


@pytest.mark.parametrize("name", ["status", "chat"])
def test_commands_that_need_a_stack_say_that_none_runs(name: str, tmp_path: Path) -> None:
    result = shoal(name, "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "start one with `shoal up`" in result.stderr


def test_fetching_a_model_that_is_not_known_names_those_that_are() -> None:
    result = shoal("model", "fetch", "gpt-17")
    assert result.exit_code == 2
    assert "known: SmolLM2-135M-Instruct" in result.stderr


def test_help_loads_neither_torch_nor_grpc_nor_http() -> None:
    code = ("import sys; from stack.__main__ import app\n"
            "try: app(['--help'])\nexcept SystemExit: pass\n"
            "print('loaded', {'torch', 'grpc', 'httpx2', 'redis', 'nats', 'transformers'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded set()" in done.stdout


def test_collect_env_masks_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_API_KEY", "sesame")
    monkeypatch.setenv("SHOAL_REDIS_URL", "redis://user:sesame@host:1/0")
    result = shoal("collect-env", "--json")
    assert result.exit_code == 0
    assert "sesame" not in result.stdout
    assert "redis://***@host:1/0" in result.stdout
