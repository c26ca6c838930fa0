"""What must be true of compose.yaml whatever else changes; a real engine runs it in `make compose-test`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "compose.yaml").read_text()
OURS = ("tokenizer", "router", "kvstore", "prefill", "decode", "prefill-gpu", "decode-gpu", "gateway")
WITHOUT_A_CHECK = {"model-init", "otel-collector"}  # ends by itself; nothing in its image can ask
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def default(text: str) -> str:
    """With every `${NAME:-value}` and `${NAME-value}` replaced by its value."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", str(text))


def test_only_words_that_old_and_new_compose_know_are_used() -> None:
    assert "name" not in COMPOSE
    assert "include" not in COMPOSE
    assert "start_interval" not in TEXT
    for name, service in SERVICES.items():
        assert "container_name" not in service, name
        for on in service.get("depends_on", {}).values():
            assert set(on) == {"condition"}, name


def test_only_the_gateway_is_published_without_a_profile_and_everything_on_loopback() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert {name for name in published if "profiles" not in SERVICES[name]} == {"gateway"}
    for name, ports in published.items():
        assert all(default(port).startswith("127.0.0.1:") for port in ports), name


@pytest.mark.parametrize("name", OURS)
def test_a_stop_waits_longer_than_the_service_drains(name: str) -> None:
    grace_s = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    drain_s = int(default(SERVICES[name]["environment"]["SHOAL_DRAIN_TIMEOUT_S"]))
    assert grace_s >= drain_s + 15  # the write-back to the store takes 5 s at most, the good-bye the rest


@pytest.mark.parametrize("name", OURS)
def test_our_services_are_locked_down_and_limited(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["init"]
    assert service["deploy"]["resources"]["limits"]["memory"]


def test_everything_has_a_health_check() -> None:
    assert {name for name, service in SERVICES.items() if "healthcheck" not in service} == WITHOUT_A_CHECK


def test_workers_and_store_share_one_folder_in_memory_of_the_services_user() -> None:
    options = COMPOSE["volumes"]["shm"]["driver_opts"]
    assert options["type"] == options["device"] == "tmpfs"
    assert {"mode=0700", "uid=10001", "gid=10001"} <= set(options["o"].split(","))
    for name in OURS:
        shares = any(str(volume).startswith("shm:") for volume in SERVICES[name].get("volumes", ()))
        assert shares == (name.split("-")[0] in ("kvstore", "prefill", "decode")), name


def test_prometheus_looks_for_metrics_where_containers_serve_them() -> None:
    port = COMPOSE["x-environment"]["SHOAL_METRICS_PORT"]
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"]
    found = {config["port"] for job in jobs for config in job.get("dns_sd_configs", ())}
    assert found == {int(port)}


def test_the_example_of_settings_names_settings_that_exist() -> None:
    named = set(re.findall(r"^#?([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    used = set(re.findall(r"\$\{([A-Z_]+)", TEXT))
    assert named == used, f"only in the example: {named - used}; only in compose.yaml: {used - named}"


def test_nothing_of_the_machine_that_builds_gets_into_the_image_unasked() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for secret in (".env", ".git", "tests"):
        assert f"!{secret}" not in ignored


def test_every_package_of_the_project_gets_into_the_image() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    wanted = {p.split(".")[0] for p in listed["packages"]} | {f"{module}.py" for module in listed.get("py-modules", ())}
    assert wanted <= let_in - {"deploy"}
