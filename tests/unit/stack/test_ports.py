from __future__ import annotations

import socket

import pytest

from common.errors import ConfigError
from stack import ports


def test_a_port_with_a_listener_is_not_free_and_the_message_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not ports.is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            ports.require_free("127.0.0.1", port)
    assert ports.is_free("127.0.0.1", port)


def test_a_chosen_port_is_below_those_the_kernel_gives_to_outgoing_connections() -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        ephemeral = int(limits.read().split()[0])
    for _ in range(20):
        port = ports.free_port("127.0.0.1")
        assert ports.is_free("127.0.0.1", port)
        assert port < ephemeral


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_this_machine_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host '{host}'"):
        ports.is_free(host, 8000)
