from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from common.config import ServiceConfig, load_or_exit
from common.errors import ConfigError


class DemoConfig(ServiceConfig):
    """For these tests."""

    service: ClassVar[str] = "demo"
    width: int = Field(3, ge=1, description="how wide")


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "demo.yaml"
    file.write_text("width: 4\nlog_level: error\nport: 1\n")
    env = {"SHOAL_WIDTH": "5", "SHOAL_DEMO_PORT": "2", "SHOAL_PORT": "9"}
    config = DemoConfig.load(["--config", str(file), "--port", "3"], env)
    assert (config.width, config.port, config.log_level, config.host) == (5, 3, "error", "127.0.0.1")


@pytest.mark.parametrize(("argv", "env", "message"), [
    (["--width", "0"], {}, r"width='0' \(from flag --width\): .*greater than or equal to 1"),
    ([], {"SHOAL_DEMO_WIDTH": "x"}, r"width='x' \(from environment SHOAL_DEMO_WIDTH\)"),
    ([], {"SHOAL_DEMO_WITH": "1"}, r"unknown field 'with' .*did you mean 'width'"),
])
def test_a_wrong_value_names_itself_and_its_source(argv: list[str], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoConfig.load(argv, env)


def test_an_unknown_key_in_the_file_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "demo.yaml"
    file.write_text("wdth: 4\n")
    with pytest.raises(ConfigError, match=r"unknown field 'wdth' .*did you mean 'width'"):
        DemoConfig.load(["--config", str(file)], {})
    with pytest.raises(ConfigError, match="No such file"):
        DemoConfig.load(["--config", str(tmp_path / "none")], {})


def test_credentials_in_a_url_are_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        DemoConfig.load([], {"SHOAL_REDIS_URL": "redis://u:secret@h/0", "SHOAL_WIDTH": "-1"})
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(("given", "host"), [("[::1]", "::1"), ("::1", "::1"), ("10.1.2.3", "10.1.2.3"), ("", "")])
def test_the_brackets_of_an_ipv6_address_are_taken_off(given: str, host: str) -> None:
    config = DemoConfig.load(["--host", given, "--advertise-host", given, "--metrics-host", given], {})
    assert (config.host, config.advertise_host, config.metrics_host) == (host, host, host)


def test_a_replica_without_a_name_draws_one_and_keeps_it() -> None:
    first, second = DemoConfig().named(), DemoConfig().named()
    assert first.service_id.startswith("demo-")
    assert first.service_id != second.service_id
    assert first.named() is first
    assert DemoConfig(service_id="demo-0").named().service_id == "demo-0"


def test_a_loaded_configuration_cannot_be_changed() -> None:
    config = DemoConfig.load([], {})
    with pytest.raises(ValidationError):
        config.width = 9  # type: ignore[misc]


def test_a_bad_start_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_or_exit(DemoConfig, ["--port", "70000"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_every_field_of_every_service_is_documented() -> None:
    from decode_svc.config import DecodeConfig
    from gateway.config import GatewayConfig
    from tokenizer_svc.config import TokenizerConfig

    for config in (DecodeConfig, GatewayConfig, TokenizerConfig):
        assert [n for n, f in config.model_fields.items() if not f.description] == []
