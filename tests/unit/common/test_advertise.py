from __future__ import annotations

import socket

import pytest

from common.advertise import advertised_host
from common.config import ServiceConfig
from common.errors import ConfigError
from common.wire_security import metrics_address


def test_the_address_that_is_named_wins_and_a_bound_one_stands_for_itself() -> None:
    assert advertised_host(ServiceConfig(host="0.0.0.0", advertise_host="decode-0.example")) == "decode-0.example"
    assert advertised_host(ServiceConfig(host="10.1.2.3")) == "10.1.2.3"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_where_all_addresses_are_bound_the_one_towards_redis_is_told(host: str) -> None:
    config = ServiceConfig(host=host, redis_url="redis://user:secret@127.0.0.1:6399/0")
    assert advertised_host(config) == "127.0.0.1"
    assert metrics_address(config, 9090) == "127.0.0.1:9090"


def test_a_container_tells_the_address_of_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.2", 6379))]
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: asked.append((host, port)) or found)
    assert advertised_host(ServiceConfig(host="0.0.0.0", redis_url="redis://valkey")) in ("127.0.0.1", "127.0.0.2")
    assert asked == [("valkey", 6379)]


def test_a_redis_that_no_name_server_knows_asks_for_the_address() -> None:
    with pytest.raises(ConfigError, match="advertise_host"):
        advertised_host(ServiceConfig(host="0.0.0.0", redis_url="redis://no-such-host.invalid"))
