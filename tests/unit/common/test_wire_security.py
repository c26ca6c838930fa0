from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.config import ServiceConfig
from common.errors import ConfigError
from common.wire_security import PLAINTEXT, is_loopback, load_security, metrics_address
from gateway.config import GatewayConfig
from tests.certificates import Ca

TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ca = Ca(tmp_path_factory.mktemp("tls"))
    cert, key = ca.issue("service")
    other, other_key = ca.issue("other")
    return {"cert": str(cert), "key": str(key), "ca": str(ca.path), "other": str(other), "other_key": str(other_key)}


def test_loopback_needs_no_security() -> None:
    assert load_security(ServiceConfig()) == PLAINTEXT


@pytest.mark.parametrize(("host", "inside"), [
    ("127.0.0.1", True), ("127.8.8.8", True), ("localhost", True), ("::1", True), ("[::1]", True),
    ("0.0.0.0", False), ("::", False), ("10.1.2.3", False), ("", False), ("pod-7", False)])
def test_only_addresses_of_this_machine_alone_are_loopback(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


@pytest.mark.parametrize("config", [ServiceConfig, GatewayConfig])
def test_plaintext_beyond_loopback_is_refused_with_what_to_do(config: type[ServiceConfig]) -> None:
    with pytest.raises(ConfigError, match=r"host='0\.0\.0\.0': not a loopback address.*tls_cert.*--insecure"):
        load_security(config(host="0.0.0.0", metrics_host="127.0.0.1"))
    load_security(config(host="0.0.0.0", insecure=True))


def test_the_metrics_port_leaves_loopback_only_where_its_address_is_named(tls: dict[str, str]) -> None:
    secured: dict[str, Any] = {"host": "0.0.0.0", "tls_cert": tls["cert"], "tls_key": tls["key"], "tls_ca": tls["ca"]}
    with pytest.raises(ConfigError, match="metrics_host: the Prometheus port speaks plaintext"):
        load_security(ServiceConfig(**secured))
    load_security(ServiceConfig(**secured, metrics_host="0.0.0.0"))
    load_security(ServiceConfig(**secured, insecure=True))


@pytest.mark.parametrize(("field", "url", "told"), [
    ("nats_url", "nats://u:hidden@nats:4222", r"nats://nats speaks plaintext beyond this machine: use tls://"),
    ("nats_url", "nats:4222", "nats://nats speaks plaintext"),
    ("redis_url", "redis://:hidden@10.1.2.3/0", r"redis://10\.1\.2\.3 speaks plaintext .*use rediss://.*--insecure")])
def test_servers_beyond_loopback_are_not_reached_in_plaintext_unless_it_is_allowed(
    tls: dict[str, str], field: str, url: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load_security(ServiceConfig.of(**{field: url, "tls_ca": tls["ca"]}))  # a CA alone does not make it TLS
    assert "hidden" not in caught.value.message
    load_security(ServiceConfig.of(**{field: url, "insecure": True}))


@pytest.mark.parametrize(("nats", "redis"), [
    ("nats://127.0.0.1:4222", "redis://[::1]:6379/0"), ("nats://localhost", "unix:///run/valkey.sock"),
    ("tls://nats:4222", "rediss://valkey/0")])
def test_servers_of_this_machine_and_servers_with_tls_need_no_permission(nats: str, redis: str) -> None:
    load_security(ServiceConfig(nats_url=nats, redis_url=redis))


def test_the_gateway_counts_as_secured_by_either_certificate(tls: dict[str, str]) -> None:
    base: dict[str, Any] = {"host": "0.0.0.0", "metrics_host": "127.0.0.1"}
    own = GatewayConfig(**base, ssl_certfile=tls["other"], ssl_keyfile=tls["other_key"])
    both = GatewayConfig(**base, tls_cert=tls["cert"], tls_key=tls["key"])
    for config in (own, both):
        load_security(config)
    assert (own.http_cert, both.http_cert) == ((tls["other"], tls["other_key"]), (tls["cert"], tls["key"]))


def test_a_key_of_the_gateway_without_its_certificate_is_refused(tls: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"ssl_keyfile='/k' \(from flag --ssl-keyfile\): .*needs ssl_certfile"):
        GatewayConfig.load(["--ssl-keyfile", "/k", "--tls-cert", tls["cert"], "--tls-key", tls["key"]], {})


@pytest.mark.parametrize(("fields", "message"), [
    ({"tls_cert": "cert"}, "tls_cert and tls_key: one does not work without the other"),
    ({"tls_cert": "cert", "tls_key": "key"}, "tls_ca: needed with tls_cert"),
    ({"tls_cert": "cert", "tls_key": "other_key", "tls_ca": "ca"}, r"tls_cert=.*does not work with key"),
    ({"tls_cert": "/none", "tls_key": "key", "tls_ca": "ca"}, "tls_cert='/none': No such file"),
    ({"tls_ca": "key"}, "tls_ca=.*holds no certificate"),
    ({"tls_client_auth": True}, "tls_client_auth: needs tls_ca"),
    ({"service_token": TOKEN, "service_token_file": "/none"}, "only one may be set"),
    ({"service_token": "short"}, "at least 16 printable ASCII characters"),
    ({"service_token_file": "/none"}, "service_token_file='/none': No such file"),
])
def test_what_cannot_work_names_its_field(tls: dict[str, str], fields: dict[str, Any], message: str) -> None:
    known = {name: tls.get(value, value) if isinstance(value, str) else value for name, value in fields.items()}
    with pytest.raises(ConfigError, match=message):
        load_security(ServiceConfig(**known))


def test_a_token_file_lists_the_one_to_send_first(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# the new one first\n{TOKEN}-new\n\n{TOKEN}-old\n")
    assert load_security(ServiceConfig(service_token_file=str(file))).tokens == (f"{TOKEN}-new", f"{TOKEN}-old")


def test_secrets_are_in_no_representation(tls: dict[str, str]) -> None:
    config = ServiceConfig(service_token=TOKEN, tls_cert=tls["cert"], tls_key=tls["key"], tls_ca=tls["ca"],
                           redis_url="rediss://u:hidden@h/0", nats_url="tls://hidden@h")
    for shown in (repr(config), str(config), repr(load_security(config))):
        assert TOKEN not in shown
        assert "hidden" not in shown
        assert "BEGIN" not in shown


def test_a_wrong_token_or_url_in_the_environment_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        GatewayConfig.load([], {"SHOAL_SERVICE_TOKEN": "hidden", "SHOAL_GATEWAY_API_KEYS": "h" * 70000,
                                "SHOAL_PORT": "-1"})
    assert "hhh" not in caught.value.message


def test_a_bare_flag_is_true() -> None:
    assert ServiceConfig.load(["--insecure", "--host", "0.0.0.0"], {}).insecure
    assert not ServiceConfig.load(["--insecure", "false"], {}).insecure


def test_metrics_are_registered_at_an_address_that_others_reach() -> None:
    outside = ServiceConfig(host="0.0.0.0", advertise_host="10.1.2.3", insecure=True)
    assert metrics_address(outside, 9) == "10.1.2.3:9"
    six = ServiceConfig(host="::", advertise_host="[fd00::7]", insecure=True)
    assert metrics_address(six, 9) == "[fd00::7]:9"
    inside = ServiceConfig(host="0.0.0.0", advertise_host="10.1.2.3", metrics_host="127.0.0.1", insecure=True)
    assert metrics_address(inside, 9) == "127.0.0.1:9"
